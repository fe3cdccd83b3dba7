"""The controller that moves nothing: replicas fan out around the unchanged schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hdet.controllers.report import Report, State


@dataclass(frozen=True)
class Fixed:
    """Leave every scale at 1.

    It estimates nothing, so its state has no `estimate` and no `error`. To see what another controller would find
    without moving anything, use that controller with `observe_only=True`.
    """

    needs_score = False

    def init(self, names: Sequence[str]) -> State:
        """Every scale is 1."""
        return {name: {"scale": 1.0} for name in names}

    def update(self, state: State, report: Report) -> State:
        """The same state."""
        return state
