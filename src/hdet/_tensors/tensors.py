"""Selects the tensors of a run to average, step back and keep, for `converge.py` and others."""

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
    """The tensors of one replica, looked up on each call, because layers get frozen and groups and state get added.

    Args:
        optimizers: the optimizers of the trained parameters.
        model: the model, if given; its buffers are averaged too.
        followers: modules and tensors that follow the weights.
        hyperparameters: the explored ones decide which optimizer state can differ.
        local: gradients are not shared, so all of it can differ.
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
        """All parameters of the optimizers, whole."""
        return parameters_of(*self._optimizers)

    def set_noisy(self, noisy: Sequence[Tensor]) -> None:
        """Set the tensors with this replica's own noise: they are averaged with the rest, trained or not."""
        trained = {id(p) for p in self.trained() if p.requires_grad}
        self._noisy = [part(p) for p in noisy if id(p) not in trained]

    def begin_round(self) -> None:
        """Note the trained parameters: they are averaged at the round's end even if frozen by then."""
        self._trained = {id(p) for p in self.trained() if p.requires_grad}

    def reshard(self) -> None:
        """Before and after writing weights, drop copies of the old ones. See `shards.reshard`."""
        torch.clear_autocast_cache()  # the caller's autocast keeps casts until it ends
        for module in self._gathering:
            module.reshard()

    @property
    def in_parts(self) -> bool:
        """Whether ranks hold parts of the trained parameters."""
        return any(map(is_dtensor, self.trained()))

    @property
    def device(self) -> torch.device | None:
        """The device of the trained parameters; None if there are none."""
        return next((p.device for p in self.trained() if p.requires_grad), None)

    def parameters(self) -> list[Tensor]:
        """The parameters that the optimizers train now."""
        return converge.parameters(self._optimizers)

    def stepped(self) -> list[Tensor]:
        """The tensors that change with every step: trained parameters and followers."""
        return once((*self.parameters(), *self.followers()))

    def which(self) -> list[int]:
        """The indices of the trained parameters among all of the optimizers'."""
        return [number for number, p in enumerate(self.trained()) if p.requires_grad]

    def buffers(self) -> list[Tensor]:
        """All buffers of the model, whatever their dtype."""
        return [] if self._model is None else list(self._model.buffers())

    def statistics(self) -> list[Tensor]:
        """The model's floating-point buffers, without those that replicas differ in on purpose."""
        return self._meant_equal(converge.buffers(self._model))

    def followers(self) -> list[Tensor]:
        """The followers, which are averaged with the weights."""
        return converge.module_tensors(self._followers)

    def followers_whole(self) -> list[Tensor]:
        """The followers as given, whole even if ranks hold parts of them."""
        return converge.tensors_of(self._followers)

    def weights(self) -> list[Tensor]:
        """The tensors of the consensus: parameters, buffers and followers."""
        found = [
            *converge.parameters(self._optimizers, self._trained),
            *converge.buffers(self._model),
            *self.followers(),
            *self._noisy,
        ]
        return self._meant_equal(once(found))

    def learned(self) -> list[Tensor]:
        """The weights that were trained in this round or got this replica's own noise."""
        found = [*converge.parameters(self._optimizers, self._trained), *self._noisy]
        return self._meant_equal(once(found))

    def name(self, tensor: Tensor) -> str:
        """The name of one of these tensors, in words. Never raises, because errors and events use it."""
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
        """The tensors that differ between replicas until the end of a round: the weights, and optimizer state."""
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
        """Create the state of optimizers that have not stepped yet, so that all replicas have the same kinds."""
        for optimizer in self._optimizers:
            if not optimizer.state:
                optimizer_state.create(optimizer)

    def kept(self) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors of a snapshot: those equal on all replicas at a round's end, and this replica's own."""
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
        """The given tensors without those in which replicas differ on purpose."""
        apart = {id(t) for h in self._forward for t in h.tensors()}
        return [t for t in tensors if id(t) not in apart]


def _same_place(one: Tensor, other: Tensor) -> bool:
    """Whether one is a view that starts where the other does, as parts and averaged views of a tensor do."""
    return 0 < one.data_ptr() == other.data_ptr()
