"""Which tensors of a run are averaged, stepped back and kept. What is done with them: `converge.py` and others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet._explore.hyperparameter import Hyperparameter
from hdet._explore.in_forward import InForward
from hdet._explore.in_groups import InGroups
from hdet._tensors import converge, optimizer_state
from hdet._tensors.parameters import once, parameters_of
from hdet._tensors.shards import gathering, is_dtensor, part


class Tensors:
    """The tensors of one replica, looked up anew each time: layers are frozen, groups and state are added.

    Args:
        optimizers: whose parameters are trained.
        model: whose buffers are averaged too, if given.
        followers: modules and tensors that follow the weights.
        hyperparameters: what is explored decides which optimizer state can differ.
        local: gradients are not shared, so that all of it can.
        keeps_state: each replica keeps its own optimizer state.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        model: nn.Module | None,
        followers: Sequence[nn.Module | Tensor],
        hyperparameters: Sequence[Hyperparameter],
        local: bool,
        keeps_state: bool = False,
    ) -> None:
        self._optimizers, self._model, self._followers, self._local = optimizers, model, followers, local
        self._keeps_state = keeps_state
        self._explored = {h.key for h in hyperparameters if isinstance(h, InGroups) and h.diverges}
        self._forward = [h for h in hyperparameters if isinstance(h, InForward)]
        self._trained: set[int] = set()
        self._noisy: list[Tensor] = []
        self._gathering = gathering(model)

    def trained(self) -> list[nn.Parameter]:
        """All that the optimizers hold, whole."""
        return parameters_of(*self._optimizers)

    def set_noisy(self, noisy: Sequence[Tensor]) -> None:
        """What replicas have their own noise in: averaged with the rest, trained or not."""
        trained = {id(p) for p in self.trained() if p.requires_grad}
        self._noisy = [part(p) for p in noisy if id(p) not in trained]

    def begin_round(self) -> None:
        """Note what is trained now: it is averaged at the round's end even if it has been frozen by then."""
        self._trained = {id(p) for p in self.trained() if p.requires_grad}

    def reshard(self) -> None:
        """Before and after weights are written: nobody keeps a copy of the old ones. See `shards.reshard`."""
        torch.clear_autocast_cache()  # the caller's autocast keeps casts until it ends
        for module in self._gathering:
            module.reshard()

    @property
    def in_parts(self) -> bool:
        """Whether ranks hold parts of what is trained."""
        return any(map(is_dtensor, self.trained()))

    @property
    def device(self) -> torch.device | None:
        """Where what is trained lives; None if nothing is."""
        return next((p.device for p in self.trained() if p.requires_grad), None)

    def parameters(self) -> list[Tensor]:
        """What the optimizers train now."""
        return converge.parameters(self._optimizers)

    def stepped(self) -> list[Tensor]:
        """What moves with every step: what is trained now, and what follows it."""
        return once((*self.parameters(), *self.followers()))

    def which(self) -> list[int]:
        """Which of all that the optimizers hold is trained now."""
        return [number for number, p in enumerate(self.trained()) if p.requires_grad]

    def buffers(self) -> list[Tensor]:
        """All buffers of the model, whatever their dtype."""
        return [] if self._model is None else list(self._model.buffers())

    def statistics(self) -> list[Tensor]:
        """The model's floating-point buffers, without those that replicas differ in on purpose."""
        return self._meant_equal(converge.buffers(self._model))

    def followers(self) -> list[Tensor]:
        """What follows the weights and is averaged along."""
        return converge.module_tensors(self._followers)

    def followers_whole(self) -> list[Tensor]:
        """The same as they were given, whole where ranks hold parts of them."""
        return converge.tensors_of(self._followers)

    def weights(self) -> list[Tensor]:
        """What makes up the consensus: parameters, buffers and followers."""
        found = [
            *converge.parameters(self._optimizers, self._trained),
            *converge.buffers(self._model),
            *self.followers(),
            *self._noisy,
        ]
        return self._meant_equal(once(found))

    def learned(self) -> list[Tensor]:
        """Of the weights those that were trained in this round, or got noise of this replica's own."""
        found = [*converge.parameters(self._optimizers, self._trained), *self._noisy]
        return self._meant_equal(once(found))

    def name(self, tensor: Tensor) -> str:
        """What one of these tensors is, in words; it is part of an error or an event, so that it never raises."""
        found = "a tensor"
        with contextlib.suppress(Exception):  # of what users put into modules and optimizers
            for name, t in self._named():
                if t is tensor:
                    return name
                if found == "a tensor" and _same_place(t, tensor):
                    found = name
        return found

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        parameters = {} if self._model is None else dict(self._model.named_parameters())
        names = {id(p): repr(name) for name, p in parameters.items()}
        for p in once((*parameters.values(), *self.trained())):
            yield f"the parameter {names.get(id(p), f'of shape {tuple(p.shape)}')}", p
        for name, buffer in [] if self._model is None else self._model.named_buffers():
            yield f"the buffer {name!r}", buffer
        for number, follower in enumerate(self._followers):
            if isinstance(follower, Tensor):
                yield f"followers[{number}]", follower
                continue
            for name, t in (*follower.named_parameters(), *follower.named_buffers()):
                yield f"{name!r} of followers[{number}]", t
        for owner, entries in (item for optimizer in self._optimizers for item in optimizer.state.items()):
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    yield f"{key} of the parameter {names.get(id(owner), f'of shape {tuple(owner.shape)}')}", value

    def to_average(self) -> list[Tensor]:
        """What replicas can differ in and must not at the end of a round: the weights, and optimizer state."""
        if self._keeps_state:
            return self.weights()
        return self.weights() + optimizer_state.that_differs(self._optimizers, self._explored, self._local)

    def own_state(self) -> list[Tensor]:
        """The optimizer state that each replica keeps to itself until the run ends."""
        return optimizer_state.that_differs(self._optimizers, self._explored, self._local) if self._keeps_state else []

    def state(self) -> list[Tensor]:
        """All optimizer state, whether replicas can differ in it or not."""
        return optimizer_state.all_of(self._optimizers)

    def fill_state(self) -> None:
        """Give optimizers that have not stepped yet the state of a first step, so that all replicas have the same."""
        for optimizer in self._optimizers:
            if not optimizer.state:
                optimizer_state.create(optimizer)

    def kept(self) -> tuple[list[Tensor], list[Tensor]]:
        """What a snapshot holds: what is equal on all replicas at a round's end, and what is this replica's own."""
        state = [
            part(value)
            for optimizer in self._optimizers
            for entries in optimizer.state.values()
            for value in entries.values()
            if isinstance(value, Tensor)
        ]
        counters = [t for t in state if t.dim() == 0]  # differ where steps were skipped; never averaged
        weights = converge.parameters(self._optimizers, self._trained)
        moments = [t for t in state if t.dim() > 0]
        shared = [*weights, *([] if self._keeps_state else moments), *self.followers()]
        own = [*self._meant_equal(self.buffers()), *counters]
        return shared, own + (moments if self._keeps_state else [])

    def _meant_equal(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those of them that replicas do not differ in on purpose."""
        apart = {id(t) for h in self._forward for t in h.tensors()}
        return [t for t in tensors if id(t) not in apart]


def _same_place(one: Tensor, other: Tensor) -> bool:
    """Whether one is a view of the other's beginning, as parts and what is averaged of a tensor are."""
    return 0 < one.data_ptr() == other.data_ptr()
