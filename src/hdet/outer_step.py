"""The outer step: take only a part of the way that a round has gone.

    theta <- theta_0 + outer_step (mean_r theta_r - theta_0)

An outer step of 1/2 every few steps forgives learning rates that are too high. Without fan-out and with shared
gradients all replicas hold the same weights, so nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdet.arguments import Rule, check_number

RULE = Rule(lambda x: 0 < x <= 1, "lie in (0, 1], where 1 takes the whole step", "0.5")


class OuterStep:
    """Remembers where a round began: one copy of the trained parameters, unless `amount` is 1."""

    def __init__(self, amount: float) -> None:
        check_number("outer_step", amount, RULE)
        self.amount = float(amount)
        self._parameters: list[Tensor] = []
        self._start: list[Tensor] = []

    @property
    def active(self) -> bool:
        """Whether it does anything."""
        return self.amount != 1.0

    @torch.no_grad()
    def begin(self, parameters: Sequence[Tensor]) -> None:
        """Remember where the round begins; copies into the last round's memory where it fits."""
        if not self.active:
            return
        self._parameters = list(parameters)
        if _layout(self._start) == _layout(parameters):
            torch._foreach_copy_(self._start, self._parameters)
        else:
            self._start = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def take(self) -> None:
        """Go back a part of the way to the beginning of the round, in place."""
        if self._parameters:
            torch._foreach_lerp_(self._parameters, self._start, 1.0 - self.amount)
            self._parameters = []

    def forget(self) -> None:
        """This round's step is taken whole."""
        self._parameters = []

    def state_dict(self) -> list[Tensor]:
        """Where this round began; empty if that is not known."""
        return [t.clone() for t in self._start] if self._parameters else []

    def load_state_dict(self, start: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """Go on from `state_dict()`.

        Raises:
            ValueError: if it was saved for other parameters.
        """
        self.forget()
        if not start or not self.active:
            return
        if [t.shape for t in start] != [p.shape for p in parameters]:
            raise ValueError("the saved start of the round is that of another model; resume with the same model")
        self.begin(parameters)
        torch._foreach_copy_(self._start, list(start))


def _layout(tensors: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype, torch.device]]:
    return [(t.shape, t.dtype, t.device) for t in tensors]
