"""The controller that moves nothing: fan-out and converge around the schedule as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hdet.controllers.report import Report, State


@dataclass(frozen=True)
class Fixed:
    """Leave every scale at 1.

    It finds nothing, so its state has no `estimate` and no `error`: what a scale is off by depends on the rule that is
    to move it. To see what another controller would find while nothing moves, use that one with `observe_only=True`.
    """

    needs_score = False

    def init(self, names: Sequence[str]) -> State:
        """Every scale is 1."""
        return {name: {"scale": 1.0} for name in names}

    def update(self, state: State, report: Report) -> State:
        """The same state."""
        return state
