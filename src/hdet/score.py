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
    """The mean of the losses added since `reset()`: one per step, or one per micro-batch.

    Args:
        early: how many of the first ones have a mean of their own; 0 for none.
    """

    def __init__(self, early: int = 0) -> None:
        self._total: Tensor | float = 0.0
        self._count = 0
        self._early = early
        self._early_total: Tensor | float | None = None

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
        if self._count == self._early:
            self._early_total = _copy(self._total)

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
        """That of the first ones; NaN while there are fewer."""
        if self._early_total is None:
            return torch.full((), math.nan, dtype=torch.float64, device=device)
        return torch.as_tensor(self._early_total, dtype=torch.float64, device=device) / self._early

    def reset(self) -> None:
        """Begin a new round."""
        self._total, self._count, self._early_total = 0.0, 0, None

    def state_dict(self) -> dict[str, Any]:
        """What was added so far in this round, to the last bit."""
        return {"total": _copy(self._total), "count": self._count, "early": _copy(self._early_total)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`."""
        total, early = state["total"], state.get("early")
        self._total = total.clone() if isinstance(total, Tensor) else float(total)
        self._count = cast(int, state["count"])
        self._early_total = _copy(early)


def _copy(total: Tensor | float | None) -> Any:
    return total.clone() if isinstance(total, Tensor) else total
