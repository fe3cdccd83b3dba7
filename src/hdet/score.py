"""What a replica is judged by: its mean loss over a round, added up on the device without waiting for it."""

from __future__ import annotations

import math
import numbers
from typing import Any, SupportsFloat, TypeAlias, cast

import torch
from torch import Tensor

Loss: TypeAlias = Tensor | SupportsFloat
_EXACT = (torch.float32, torch.float64)


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

    def add(self, loss: Tensor | float) -> None:
        """Add one loss, as `as_loss` returns it, and keep nothing of it. No collective, no host read."""
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

    @property
    def count(self) -> int:
        """How many losses were added."""
        return self._count

    def mean(self, device: torch.device) -> Tensor:
        """The mean so far, a float64 scalar on `device`; NaN if nothing was added."""
        if self._count == 0:
            return torch.full((), math.nan, dtype=torch.float64, device=device)
        return torch.as_tensor(self._total, dtype=torch.float64, device=device) / self._count

    def early_mean(self, device: torch.device) -> Tensor:
        """What it was when it was marked; NaN if it was not."""
        total, count = self._early or (math.nan, 1)
        return torch.as_tensor(total, dtype=torch.float64, device=device) / count

    def reset(self) -> None:
        """Begin a new round."""
        self._total, self._count, self._early = 0.0, 0, None

    def state_dict(self) -> dict[str, Any]:
        """What was added so far in this round, to the last bit."""
        early = None if self._early is None else (_copy(self._early[0]), self._early[1])
        return {"total": _copy(self._total), "count": self._count, "early": early}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`."""
        total, early = state["total"], state.get("early")
        self._total = total.clone() if isinstance(total, Tensor) else float(total)
        self._count = cast(int, state["count"])
        self._early = None if early is None else (_copy(early[0]), int(early[1]))


def early_of(state: dict[str, Any]) -> dict[str, Any]:
    """A saved score of which only the early mean is left."""
    return {**Score().state_dict(), "early": state.get("early")}


def _copy(total: Tensor | float) -> Tensor | float:
    return total.clone() if isinstance(total, Tensor) else total
