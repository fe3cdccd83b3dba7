"""One record per round: what was tried, how it scored, and where the centers went."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
        memory: what the controller remembers about it, by name: velocities, fits.
        estimate: the logarithm of the factor by which the controller finds the scale to be off, if it says.
        error: the standard error of the estimate.
        finding: the estimate in words: "learning_rate: x1.80 +- 0.20".
    """

    base: float
    center: float
    values: tuple[float, ...]
    scale: float
    proposed_scale: float
    memory: Mapping[str, float] = field(default_factory=dict)
    estimate: float | None = None
    error: float | None = None
    finding: str = ""


@dataclass(frozen=True)
class RoundRecord:
    """One round, the same on every replica.

    Attributes:
        round: its index, from 0.
        step: optimizer steps taken when it ended.
        full: False for a round cut short by `converge()` or by the end of the run; the controller ignores it.
        scores: the replicas' mean losses, by replica; NaN where no loss was given.
        hyperparameters: by name.
        probe: the loss of each replica's last weights on the round's probe; None without one.
        start: the loss of the weights that the round began with on it; None if it was not measured.
        round_seconds: from the end of the last round to the end of this one, on this replica.
        converge_seconds: of these, spent on comparing and averaging.
        probe_seconds: of these, spent on the probe.
        events: what else happened, in words: a rollback, what a controller picked and why.
    """

    round: int
    step: int
    full: bool
    scores: tuple[float, ...]
    hyperparameters: Mapping[str, HyperparameterRecord]
    probe: tuple[float, ...] | None = None
    start: float | None = None
    round_seconds: float = 0.0
    converge_seconds: float = 0.0
    probe_seconds: float = 0.0
    events: tuple[str, ...] = ()


OnRound: TypeAlias = Callable[[RoundRecord], object]
"""A sink for records: any callable."""
