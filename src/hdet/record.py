"""One record per round: what was tried, how it scored, and where the centers went."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class HyperparameterRecord:
    """One hyperparameter in one round.

    Attributes:
        base: the schedule's value at the round's last step.
        center: base times scale, as trained with.
        values: center times multiplier, by replica.
        scale: the factor on the schedule from the next step on.
        proposed_scale: what the controller asked for; differs from `scale` only with `act=False`.
    """

    base: float
    center: float
    values: tuple[float, ...]
    scale: float
    proposed_scale: float


@dataclass(frozen=True)
class RoundRecord:
    """One round, the same on every replica.

    Attributes:
        round: its index, from 0.
        step: optimizer steps taken when it ended.
        full: False for a round cut short by `converge()` or by the end of the run; the controller ignores it.
        scores: the replicas' mean losses, by replica; NaN where no loss was given.
        hyperparameters: by name.
    """

    round: int
    step: int
    full: bool
    scores: tuple[float, ...]
    hyperparameters: Mapping[str, HyperparameterRecord]


OnRound: TypeAlias = Callable[[RoundRecord], object]
"""A sink for records: any callable."""
