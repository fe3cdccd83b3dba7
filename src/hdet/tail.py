"""The tail average: half of the way from the last weights of a run to the mean of those its last rounds ended with.

    theta <- (theta + mean_k theta_k) / 2          k: the rounds of the last part of the run

When the run ends, the probe compares it with the last weights, and the better ones stay. Averaging over time takes out
what weights owe to the last batches: it gains where data come in the order of time, and loses where the model still
learns. So nobody has to know beforehand. Half of the way has most of the gain and half of the noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hdet.arguments import Rule, check_number

_PROBES = 16  # that the two are compared on: docs/research.md, "The tail average"
_FAR = 0.5  # of the way to the mean
_LEAST = 2  # round ends that are worth an average

_RULE = Rule(lambda x: 0 <= x <= 1, "lie in [0, 1], a part of the run; 0 for none", "0.5")


def check_part(part: float, total_steps: int | None, probe: object, model: nn.Module | None) -> float:
    """The part of the run that a user wants averaged, if it can be.

    Raises:
        TypeError, ValueError: if it cannot, with what to write instead.
    """
    check_number("tail_average", part, _RULE)
    if part and total_steps is None:
        raise ValueError("tail_average is a part of the run, whose length must be known: write total_steps=...")
    reason = None if not part else unfit(probe, model)
    if reason is not None:
        raise ValueError(f"tail_average cannot be used: {reason}; leave it out, or write tail_average=0")
    return float(part)


def unfit(probe: object, model: nn.Module | None) -> str | None:
    """Why the weights of this model cannot be averaged over time; None if they can."""
    if probe is None:
        return "it needs a probe, which compares it with the last weights (probe=hdet.Probe(...))"
    if model is None:
        return "it needs to know the model (model=model)"
    if any(module._buffers.get("running_mean") is not None for module in model.modules()):
        return "the running statistics of its normalisation would not be those of the averaged weights"
    return None


def probes_at_end(part: float, probe: object, model: nn.Module | None) -> int:
    """How often a probe is scored when the run ends; 0 without an average."""
    return 2 * _PROBES if part and unfit(probe, model) is None else 0


class Compared(NamedTuple):
    """The tail average against the last weights, the same on every replica.

    Attributes:
        better: whether the average is to be taken: where its loss is lower by more than a standard error.
        loss: of the last weights.
        gain: by how much the average's is lower.
        error: the standard error of that.
    """

    better: bool
    loss: float
    gain: float
    error: float


def compare(last: Sequence[float], average: Sequence[float]) -> Compared:
    """What the losses of the last weights and of the tail average say, by probe; two at least.

    >>> compare([1.0, 2.0, 3.0], [0.9, 1.9, 2.9])
    Compared(better=True, loss=2.0, gain=0.1, error=0.0)
    >>> compare([1.0, 2.0], [0.5, 2.4]).better
    False
    """
    gains = [a - b for a, b in zip(last, average, strict=True)]
    if not all(map(math.isfinite, gains)):
        return Compared(False, statistics.fmean(last), math.nan, math.nan)
    error = statistics.stdev(gains) / math.sqrt(len(gains))
    gain, error = round(statistics.fmean(gains), 12), round(error, 12)  # 12 digits: equal losses are equal
    return Compared(gain > error, statistics.fmean(last), gain, error)


class Tail:
    """Holds the mean of the weights at the round ends of the last part of a run, in single precision at least.

    The copy is made before the first step: a run that it does not fit into fails at once.

    Args:
        part: which part of the run, in [0, 1]; 0 for none.
        total_steps: optimizer steps of the whole run.
    """

    def __init__(self, part: float, total_steps: int | None) -> None:
        self._begin = math.inf if not part or total_steps is None else total_steps * (1 - part)
        self._part = part
        self._tensors: list[Tensor] = []
        self._mean: list[Tensor] = []
        self._count = 0

    @property
    def active(self) -> bool:
        """Whether it does anything."""
        return self._begin < math.inf

    def stop(self) -> None:
        """Do nothing from now on, and give the memory back."""
        self._begin = math.inf
        self._tensors, self._mean, self._count = [], [], 0

    def reset(self) -> None:
        """Begin anew: what was averaged so far does not count."""
        self._count = 0

    @torch.no_grad()
    def reserve(self, tensors: Sequence[Tensor]) -> None:
        """Have memory for the mean of these; begin anew where they are not those of the last time."""
        if not self.active or _same(self._tensors, tensors):
            return
        self._mean = []  # the old memory first
        self._tensors = list(tensors)
        self._mean = [torch.zeros_like(t, dtype=_wide(t), requires_grad=False) for t in tensors]
        self._count = 0

    @torch.no_grad()
    def add(self, tensors: Sequence[Tensor], step: int) -> None:
        """Count the weights that a round has ended with at `step`, the same on all replicas. Sends nothing."""
        if step <= self._begin:
            return
        self.reserve(tensors)
        self._count += 1
        if self._count == 1:  # a copy: what is left in the memory may not be finite
            torch._foreach_copy_(self._mean, list(tensors))
            return
        wide = [t.to(mean.dtype) for t, mean in zip(tensors, self._mean, strict=True)]
        torch._foreach_lerp_(self._mean, wide, 1 / self._count)

    def settle(self, score: Callable[[int], float], act: bool = True) -> str | None:
        """When the run ends: leave the better of the last weights and the tail average. Collective where `score` is.

        Args:
            score: the loss of the current weights on the probe of this number, the same on all replicas.
            act: False to leave the last weights whatever comes out.

        Returns:
            What was found, in words; None if nothing was compared.
        """
        if self._count < _LEAST:
            self.reset()
            return None
        count = self._count
        self.reset()
        self._go_back()
        last, average = [], []
        for number in range(_PROBES):
            last.append(score(number))
            with self._swapped():
                average.append(score(number))
        found = compare(last, average)
        if found.better and act:
            self._swap()
        return _tell(found, act, self._part, count)

    @torch.no_grad()
    def _go_back(self) -> None:
        """From the mean towards the last weights, in place."""
        for mean, tensor in zip(self._mean, self._tensors, strict=True):
            mean.lerp_(tensor.to(mean.dtype), 1 - _FAR)

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        """Within it the weights are the average; afterwards they are as they were, bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for tensor, mean in zip(self._tensors, self._mean, strict=True):
            kept = tensor.to(mean.dtype, copy=True)
            tensor.copy_(mean)
            mean.copy_(kept)

    def state_dict(self) -> dict[str, Any]:
        """The mean so far, the same on all replicas; nothing before there is one."""
        return {"tail": {"count": self._count, "mean": [t.clone() for t in self._mean]}} if self._count else {}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        """Go on from `state_dict()`; other entries of `state` are left alone.

        Raises:
            ValueError: if it was saved for other parameters.
        """
        saved = state.get("tail")
        self.reset()
        if saved is None or not self.active:
            return
        if [t.shape for t in saved["mean"]] != [t.shape for t in tensors]:
            raise ValueError(
                "the saved tail average is that of another model; resume with the same model, and the same layers "
                "frozen, or write tail_average=0"
            )
        self.reserve(tensors)
        self._count = int(saved["count"])
        for mean, value in zip(self._mean, saved["mean"], strict=True):
            mean.copy_(value)


def _tell(found: Compared, act: bool, part: float, count: int) -> str:
    what = f"half of the way to the mean of {count} round ends in the last {100 * part:.0f} % of the run"
    if not math.isfinite(found.gain):
        return f"tail average: left, {what}: its loss or that of the last weights is not finite"
    percent = 100 / abs(found.loss) if found.loss else math.nan
    how = f"probe loss {found.loss:.4g}, {-percent * found.gain:+.2f} +- {percent * found.error:.2f} % with it"
    done = ("taken" if act else "would be taken") if found.better else "left, the last weights stay"
    return f"tail average: {done}; {what} ({how})"


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _same(held: Sequence[Tensor], tensors: Sequence[Tensor]) -> bool:
    """Whether these share their memory; the objects, views of expanded tensors and of parts, are made anew."""
    return list(map(_place, held)) == list(map(_place, tensors))


def _place(tensor: Tensor) -> tuple[int, torch.Size, torch.dtype]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype
