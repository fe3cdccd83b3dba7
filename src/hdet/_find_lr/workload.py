"""What a search trains and scores: a step function and a probe that are given, or batches of a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from hdet._find_lr.loader import SCORED, Kept, to_device
from hdet._probe.probe import Probe, check_loss
from hdet._replicas import Replicas
from hdet._tensors.restore import without_autocast

_FEW = 8  # steps whose batches are few
_PROBE = 0  # the index of the one probe that everything is scored on


class Workload(Protocol):
    """What the steps of a search are made of.

    Attributes:
        without_gradients: what is wrong if no parameter has a gradient after `backward()`.
        doubts: what speaks against any answer, once it is prepared.
    """

    without_gradients: str
    doubts: tuple[str, ...]

    def prepare(self, replicas: Replicas, device: torch.device) -> None:
        """Before everything else; collective."""

    def backward(self, index: int) -> None:
        """Forward and backward pass of this replica's training batch `index`; the gradients were cleared."""

    def step(self, optimizers: Sequence[Optimizer]) -> None:
        """The optimizers' step with these gradients."""

    def share(self, replicas: Replicas) -> Tensor:
        """This replica's part of the probe: (sum of n loss, sum of n) over its batches."""

    def rewind(self) -> None:
        """As before the first step."""


class StepFunction:
    """A function that does forward and backward pass of a batch, and a probe.

    Args:
        model: what the probe scores.
        step_fn: called with the index of the batch.
        probe: what the weights are scored on.
    """

    without_gradients = "step_fn must call backward() on its loss, but no parameter has a gradient after it"
    doubts: tuple[str, ...] = ()

    def __init__(self, model: nn.Module, step_fn: Callable[[int], Any], probe: Probe) -> None:
        self._model, self._probe = model, probe
        self.backward = step_fn

    def prepare(self, replicas: Replicas, device: torch.device) -> None:
        self._device = device

    def step(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            with without_autocast(self._device):  # as in training, where steps are outside of it
                optimizer.step()

    def share(self, replicas: Replicas) -> Tensor:
        return self._probe.share(self._model, _PROBE, replicas)

    def rewind(self) -> None:
        """Nothing: what steps change is in `also`."""


class Batches:
    """Batches of this replica, some to train on and some to score; one training step may take several.

    Args:
        model: what is trained, in the wrapper that shares the gradients.
        loss_fn: `loss_fn(model, batch)`, the mean loss.
        kept: the batches.
        accumulate: how many a step takes.
        clip: called before each step, once the gradients are those of the loss itself.
        scaler: scales the loss where gradients are in half precision.
        probe: what the weights are scored on instead of batches that were kept.
    """

    without_gradients = (
        "loss_fn must return a loss that depends on parameters of the optimizer, but none of them has a gradient after "
        "backward(); give loss_fn(model, batch) the model that it is called with"
    )

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        kept: list[Kept],
        *,
        accumulate: int = 1,
        clip: Callable[[], object] | None = None,
        scaler: GradScaler | None = None,
        probe: Probe | None = None,
    ) -> None:
        self.model, self.loss_fn = model, loss_fn
        self._kept, self._accumulate, self._clip, self._probe = kept, accumulate, clip, probe
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._state = None if self._scaler is None else _ScalerState(self._scaler)

    def prepare(self, replicas: Replicas, device: torch.device) -> None:
        """As many batches on every replica, as a forward pass of a sharded one is collective."""
        self._device = device
        count = torch.tensor([len(self._kept)], dtype=torch.float64, device=device)
        counts = [round(row[0]) for row in replicas.ranks.gather(count)]
        usable = self._kept[: min(counts)]
        self.doubts = _few(min(counts), self._accumulate, max(counts))
        scored = spread_out(len(usable), 0 if self._probe is not None else SCORED * self._accumulate)
        self._train = [kept for number, kept in enumerate(usable) if number not in scored] or usable
        self._own = self._probe_of([usable[number] for number in scored]) if self._probe is None else None

    def backward(self, index: int) -> None:
        for number, micro in enumerate(range(index * self._accumulate, (index + 1) * self._accumulate)):
            kept = self._train[micro % len(self._train)]
            with _gradients_shared(self.model, number == self._accumulate - 1):
                self.pass_through(self.moved(kept.batch))

    def moved(self, batch: Any) -> Any:
        """A copy of a batch, as the training has it: by default the same on the device."""
        return to_device(batch, self._device)

    def pass_through(self, batch: Any) -> None:
        """Forward and backward pass of one micro-batch."""
        loss = check_loss(self.loss_fn(self.model, batch)) / self._accumulate
        if loss.requires_grad:
            with without_autocast(self._device):
                (loss if self._scaler is None else self._scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]

    def step(self, optimizers: Sequence[Optimizer]) -> None:
        scaler = self._scaler
        with without_autocast(self._device):
            for optimizer in optimizers if scaler is not None else ():
                scaler.unscale_(optimizer)  # type: ignore[union-attr]
            if self._clip is not None:
                self._clip()
            for optimizer in optimizers:
                optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()

    def share(self, replicas: Replicas) -> Tensor:
        if self._own is None:
            assert self._probe is not None
            return self._probe.share(self.model, _PROBE, replicas)
        return self._own.sums(self.model, _PROBE)

    def rewind(self) -> None:
        if self._state is not None:
            self._state.restore()

    def _probe_of(self, scored: list[Kept]) -> Probe:
        def loss(model: nn.Module, kept: Kept) -> Tensor:
            return self.loss_fn(model, self.moved(kept.batch))

        return Probe(lambda index: scored, loss)


def _few(count: int, accumulate: int, most: int) -> tuple[str, ...]:
    """Why batches are too few to tell; a single one on each replica may be all data at once, which is enough."""
    if most == 1 or count >= _FEW * accumulate:
        return ()
    others = "" if count == most else f" on one replica, and others have {most}"
    return (f"the loader gave only {count} batches{others}; they are trained on over and over",)


def spread_out(count: int, wanted: int) -> set[int]:
    """Which of `count` batches are scored and not trained on: at most half of them, from everywhere among them.

    >>> sorted(spread_out(68, 4)), sorted(spread_out(3, 4)), sorted(spread_out(1, 4)), spread_out(9, 0)
    ([0, 17, 34, 51], [0], [0], set())
    """
    taken = min(wanted, max(1, count // 2))
    return {number * count // taken for number in range(taken)}


@contextmanager
def _gradients_shared(model: nn.Module, last: bool) -> Iterator[None]:
    """Gradients are shared in the last pass of a step only, as training with accumulation does."""
    if last:
        yield
        return
    switches: list[Any] = [module for module in model.modules() if hasattr(module, "require_backward_grad_sync")]
    before = [module.require_backward_grad_sync for module in switches]
    for module in switches:
        module.require_backward_grad_sync = False
    try:
        yield
    finally:
        for module, was in zip(switches, before, strict=True):
            module.require_backward_grad_sync = was


class _ScalerState:
    """A grad scaler as it is: its scale may not have been made yet."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self._values = dict(vars(scaler))
        self._tensors = [(value, value.clone()) for value in self._values.values() if isinstance(value, Tensor)]
        self._seen = dict(scaler._per_optimizer_states)

    @torch.no_grad()
    def restore(self) -> None:
        vars(self._scaler).update(self._values)
        for tensor, value in self._tensors:
            tensor.copy_(value)
        self._scaler._per_optimizer_states.clear()
        self._scaler._per_optimizer_states.update(self._seen)
