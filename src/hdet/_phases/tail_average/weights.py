"""The tail average: halfway from the last weights of a run to the mean of the weights at its last round ends.

    theta <- (theta + mean_k theta_k) / 2          k: the rounds of the last part of the run

When the run ends, the probe compares it with the last weights and keeps the better ones. Averaging over time removes
the influence of the last batches: it helps if data come in order of time, and hurts while the model still learns. The
probe decides, so the user need not know in advance. Half the distance has most of the gain and half of the noise.

torch.optim.swa_utils.AveragedModel is not used: it copies whole modules in their own precision, while this keeps one
copy of the trained tensors and their followers, in at least single precision, and supports sharded tensors.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdet._run.tail_fit import PROBES

_LEAST = 2  # round ends needed for an average
_MOST = 1e150  # losses beyond this overflow when squared


class Compared(NamedTuple):
    """The tail average compared with the last weights, the same on every replica.

    Attributes:
        better: whether to take the average: its loss is lower by more than a standard error.
        loss: loss of the last weights.
        gain: how much lower the average's loss is.
        error: standard error of the gain.
    """

    better: bool
    loss: float
    gain: float
    error: float


def compare(last: Sequence[float], average: Sequence[float]) -> Compared:
    """Compare the losses of the last weights and of the tail average, by probe; at least two.

    >>> compare([1.0, 2.0, 3.0], [0.5, 1.5, 2.5])
    Compared(better=True, loss=2.0, gain=0.5, error=0.0)
    >>> compare([1.0, 2.0], [0.5, 2.4]).better
    False
    """
    gains = [a - b for a, b in zip(last, average, strict=True)]
    if not all(abs(x) < _MOST for x in (*last, *gains)):
        return Compared(False, math.nan, math.nan, math.nan)
    gain, error = statistics.fmean(gains), statistics.stdev(gains) / math.sqrt(len(gains))
    return Compared(gain > error, statistics.fmean(last), gain, error)


class Outcome(NamedTuple):
    """Whether the tail average was taken, and why, in words."""

    taken: bool
    text: str


class Tail:
    """Holds the mean of the weights at the round ends of the last part of a run, in single precision at least.

    Allocates the copy before the first step, so that a run without enough memory fails at once.

    Args:
        part: part of the run at its end, in [0, 1]; 0 or None for none.
        total_steps: optimizer steps of the whole run.
    """

    def __init__(self, part: float | None, total_steps: int | None) -> None:
        self._begin = math.inf if not part or total_steps is None else total_steps * (1 - part)
        self._stopped: str | None = None
        self._given: list[Tensor] = []
        self._tensors: list[Tensor] = []  # without tensors that share another one's memory
        self._mean: list[Tensor] = []
        self.reset()

    @property
    def count(self) -> int:
        """The number of round ends in the mean."""
        return self._count

    @property
    def held(self) -> list[Tensor]:
        """What it has in memory."""
        return self._mean

    @property
    def active(self) -> bool:
        """Whether it does anything."""
        return self._begin < math.inf and self._stopped is None

    def stop(self, reason: str) -> None:
        """Do nothing from now on, and free the memory."""
        if self.active:
            self._stopped = reason
        self.release()

    def reset(self) -> None:
        """Start over: drop the mean so far."""
        self._count, self._since, self._until = 0, 0, -1

    def release(self) -> None:
        """Start over, and free the memory until it is needed again."""
        self.reset()
        self._given, self._tensors, self._mean = [], [], []

    @torch.no_grad()
    def reserve(self, tensors: Sequence[Tensor]) -> None:
        """Allocate memory for the mean of these tensors; start over if they are not the previous ones."""
        if not self.active or _same(self._given, tensors):
            return
        self.release()  # the old memory first
        self._given, self._tensors = list(tensors), _apart(tensors)
        self._mean = [torch.zeros_like(t, dtype=_wide(t), requires_grad=False) for t in self._tensors]

    @torch.no_grad()
    def add(self, tensors: Sequence[Tensor], step: int) -> None:
        """Add the weights at a round's end at `step`, the same on all replicas. Sends nothing."""
        if not self.active or step <= max(self._begin, self._until):
            return
        self.reserve(tensors)
        self._count, self._until = self._count + 1, step
        if self._count == 1:  # copy: the memory may contain values that are not finite
            self._since = step
            torch._foreach_copy_(self._mean, self._tensors)
        elif all(t.dtype == mean.dtype for t, mean in zip(self._tensors, self._mean, strict=True)):
            torch._foreach_lerp_(self._mean, self._tensors, 1 / self._count)
        else:  # one after another, so that there is no second copy of all
            for tensor, mean in zip(self._tensors, self._mean, strict=True):
                mean.lerp_(tensor.to(mean.dtype), 1 / self._count)

    def conclude(self, score: Callable[[int], float], observe_only: bool = False) -> Outcome | None:
        """At the end of the run, keep the better of the last weights and the tail average. Collective if `score` is.

        Args:
            score: the loss of the current weights on the probe of this number, the same on all replicas.
            observe_only: keep the last weights in any case.

        Returns:
            The outcome; None if there is no tail average.
        """
        if self._stopped is not None:
            return Outcome(False, f"tail average: none, {self._stopped}")
        if not self.active:
            return None
        count, since = self._count, self._since
        if count < _LEAST:
            self.release()
            return Outcome(False, f"tail average: none, as {count} rounds have ended since step {self._begin:g}")
        self._meet_half_way()
        last, average = [], []
        for number in range(PROBES):
            last.append(score(number))
            with self._swapped():
                average.append(score(number))
            if not math.isfinite(last[-1] - average[-1]):  # no need for more probes
                break
        found = compare(last, average)
        if found.better and not observe_only:
            self._swap()
        self.release()
        return _tell(found, observe_only, f"half of the way to the mean of {count} round ends since step {since}")

    @torch.no_grad()
    def _meet_half_way(self) -> None:
        """Turn the mean into the average, in place."""
        for mean, tensor in zip(self._mean, self._tensors, strict=True):
            mean.lerp_(tensor.to(mean.dtype), 0.5)
        self.reset()  # an error from now on keeps the last weights and drops the mean

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        """Use the average as weights within this context; afterwards restore the weights bit for bit."""
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

    def state_dict(self, trained: Sequence[int]) -> dict[str, Any]:
        """The mean so far, the same on all replicas; empty before the first round end.

        Args:
            trained: which parameters are trained, to recognise a change.
        """
        if not self._count:
            return {}
        told = {"count": self._count, "since": self._since, "until": self._until, "trained": list(trained)}
        return {**told, "mean": [t.clone() for t in self._mean]}

    def check_state(self, state: dict[str, Any], tensors: Sequence[Tensor], trained: Sequence[int]) -> None:
        """Raise if `load_state_dict` cannot use this state.

        Raises:
            ValueError: if it was saved for other parameters.
        """
        if not state or not self.active:
            return
        same = state["trained"] == list(trained) and [t.shape for t in state["mean"]] == [
            t.shape for t in _apart(tensors)
        ]
        if not same:
            raise ValueError(
                "the saved tail average belongs to another model, to other layers, or is sharded differently; resume "
                "with the same model, frozen and sharded as before, or write hdet.Averaging(tail=0)"
            )

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        """Resume from `state_dict()`.

        If this run is longer, and the saved mean started before its last part, the mean starts over.
        """
        self.reset()
        if not state or not self.active or state["since"] <= self._begin:
            return
        self.reserve(tensors)
        self._count, self._since, self._until = (int(state[name]) for name in ("count", "since", "until"))
        torch._foreach_copy_(self._mean, list(state["mean"]))


def _tell(found: Compared, observe_only: bool, what: str) -> Outcome:
    if not math.isfinite(found.gain):
        return Outcome(False, f"tail average: left, {what}: its loss or that of the last weights is not finite")
    percent = 100 / abs(found.loss) if found.loss else math.nan
    how = f"probe loss {found.loss:.4g}, {-percent * found.gain:+.2f} +- {percent * found.error:.2f} % with it"
    if found.better and not observe_only:
        return Outcome(True, f"tail average: taken; {what} ({how})")
    done = "would be taken" if found.better else "left, the last weights stay"
    return Outcome(False, f"tail average: {done}; {what} ({how})")


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.itemsize == 1 else torch.promote_types(tensor.dtype, torch.float32)


def _apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors whose memory is not part of another one's: swapping memory twice would not restore it."""
    kept: set[int] = set()
    device, end = None, 0
    for tensor in sorted(tensors, key=lambda t: (str(t.device), t.data_ptr(), -t.nbytes)):
        if tensor.device != device:
            device, end = tensor.device, 0
        if tensor.data_ptr() + tensor.nbytes > end:
            kept.add(id(tensor))
            end = tensor.data_ptr() + tensor.nbytes if tensor.is_contiguous() else end
    return [t for t in tensors if id(t) in kept]


def _same(held: Sequence[Tensor], tensors: Sequence[Tensor]) -> bool:
    """Whether these share their memory; views of expanded tensors and of parts are new objects each time."""
    return len(held) == len(tensors) and all(
        a is b or _place(a) == _place(b) for a, b in zip(held, tensors, strict=True)
    )


def _place(tensor: Tensor) -> tuple[int, torch.Size, torch.dtype]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype
