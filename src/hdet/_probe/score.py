"""A replica's mean loss over a round, summed on the device without waiting for it."""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Sequence
from typing import Any, SupportsFloat, TypeAlias, cast

import torch
from torch import Tensor

Loss: TypeAlias = Tensor | SupportsFloat
_EXACT = (torch.float32, torch.float64)
_SECONDS_BETWEEN_READS, _SELDOM = 0.25, 5.0


def as_loss(loss: Loss) -> Tensor | float:
    """`loss` as a detached 0-d tensor of at least single precision, or as a float. Reads nothing back.

    Raises:
        TypeError: for anything but a real floating-point tensor or a real number.
        ValueError: for a tensor with several elements.
    """
    if isinstance(loss, Tensor):
        if loss.dtype in _EXACT and loss.dim() == 0:  # the usual case, and cheap on purpose
            return loss.detach() if loss.requires_grad else loss
        if not loss.is_floating_point():
            raise TypeError(f"loss must be a real floating-point tensor, got dtype {loss.dtype}; pass loss.float()")
        if loss.numel() != 1:
            raise ValueError(
                f"loss must have one element, got shape {tuple(loss.shape)}; pass loss.mean(), "
                "the mean over this replica's batch"
            )
        scalar = loss.detach().reshape(())
        return scalar if scalar.dtype in _EXACT else scalar.float()
    if isinstance(loss, numbers.Real) and not isinstance(loss, bool):
        return float(loss)
    raise TypeError(
        f"loss must be a tensor with one element or a real number, got {type(loss).__name__}; "
        "pass this replica's training loss, for example step(loss)"
    )


class Score:
    """The mean of the losses added since `reset()`: one per step, or one per micro-batch."""

    def __init__(self) -> None:
        self._total: Tensor | float = 0.0
        self._count = 0
        self._early: tuple[Tensor | float, int] | None = None
        self._first: tuple[Tensor | float, int] | None = None

    def add(self, loss: Tensor | float) -> None:
        """Add one loss, as returned by `as_loss`, without keeping the tensor. No collective, no host read."""
        total = self._total
        self._count += 1
        if not isinstance(total, Tensor):
            self._total = loss + total  # a new tensor: the caller may go on to change the loss
        elif isinstance(loss, Tensor) and (loss.device != total.device or loss.dtype != total.dtype):
            self._total = total.to(loss.device) + loss
        else:
            total += loss

    def mark(self) -> None:
        """Keep the mean so far as the early one, unless there is one. No host read."""
        if self._early is None and self._count:
            self._early = _copy(self._total), self._count

    def mark_first(self) -> None:
        """Keep the mean so far as that of the run's first step. No host read."""
        if self._count:
            self._first = _copy(self._total), self._count

    @property
    def count(self) -> int:
        """The number of losses added."""
        return self._count

    def mean(self, device: torch.device) -> Tensor:
        """The mean so far, a float64 scalar on `device`; NaN if nothing was added."""
        if self._count == 0:
            return torch.full((), math.nan, dtype=torch.float64, device=device)
        return torch.as_tensor(self._total, dtype=torch.float64, device=device) / self._count

    def early_mean(self, device: torch.device) -> Tensor:
        """The mean when it was marked; NaN if it was not."""
        return _mean(self._early, device)

    def first_mean(self, device: torch.device) -> Tensor:
        """That of the run's first step; NaN if it was not in this round."""
        return _mean(self._first, device)

    def reset(self) -> None:
        """Begin a new round."""
        self._total, self._count, self._early, self._first = 0.0, 0, None, None

    def include(self, other: Score) -> None:
        """Add the losses of another score. No host read."""
        if other._count:
            self.add(other._total)
            self._count += other._count - 1

    def read(self) -> float:
        """The mean so far. Waits for the device that the losses are on."""
        return float(self._total) / self._count

    def read_first(self) -> float | None:
        """That of the run's first step; None if it was not in this round. Waits for the device."""
        return None if self._first is None else float(self._first[0]) / self._first[1]

    @property
    def device(self) -> torch.device:
        """Where the losses are."""
        return self._total.device if isinstance(self._total, Tensor) else torch.device("cpu")

    def state_dict(self) -> dict[str, Any]:
        """The sums of this round so far, exactly."""
        return {"total": _copy(self._total), "count": self._count, **self.first_losses()}

    def first_losses(self) -> dict[str, Any]:
        """Only the means of the first steps."""
        return {"early": _kept(self._early), "first": _kept(self._first)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict()`, or from `first_losses()`."""
        total = state.get("total", 0.0)
        self._total = total.clone() if isinstance(total, Tensor) else float(total)
        self._count = cast(int, state.get("count", 0))
        self._early, self._first = _kept(state["early"]), _kept(state["first"])


def typical(losses: Sequence[float]) -> float:
    """The mean loss of some replicas, of three or more without the odd one: the highest counts as the second highest.

    >>> typical([2.0, 3.0, 1e30, 1.0])
    2.25
    >>> typical([2.0, math.nan])
    nan
    """
    if len(losses) < 3 or not all(map(math.isfinite, losses)):
        return sum(losses) / len(losses)
    ranked = sorted(losses)
    return math.fsum([*ranked[:-1], ranked[-2]]) / len(ranked)


class OwnLoss:
    """This replica's own mean loss if replicas gather nothing. Waits for a device only now and then.

    Attributes:
        steps: number of steps behind the last mean.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._kept, self._kept_steps = Score(), 0
        self._read_at = -math.inf

    def read(self, score: Score, steps: int, *, now: bool = False, seldom: bool = False) -> float | None:
        """The mean since the last read, including `score`; None if there is no loss or it is too early to wait again.

        Args:
            score: score of the round that has ended.
            steps: steps of that round.
            now: read it even if that blocks.
            seldom: wait for a device less often.
        """
        kept = self._kept
        kept.include(score)
        self._kept_steps += steps
        if not kept.count or kept.device.type == "meta":
            return None
        at = time.monotonic()
        if (
            kept.device.type != "cpu"
            and not now
            and at - self._read_at < (_SELDOM if seldom else _SECONDS_BETWEEN_READS)
        ):
            return None
        self._read_at = at
        mean = kept.read()
        kept.reset()
        self.steps, self._kept_steps = self._kept_steps, 0
        return mean


def _kept(marked: Any) -> tuple[Tensor | float, int] | None:
    return None if marked is None else (_copy(marked[0]), int(marked[1]))


def _mean(marked: tuple[Tensor | float, int] | None, device: torch.device) -> Tensor:
    total, count = marked or (math.nan, 1)
    return torch.as_tensor(total, dtype=torch.float64, device=device) / count


def _copy(total: Tensor | float) -> Tensor | float:
    return total.clone() if isinstance(total, Tensor) else total
