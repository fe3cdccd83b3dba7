"""How to handle failures: `Safety`, with `Rollback` and `Limits`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from hdet._arguments import Rule, check_count, check_flag, check_number

_CUT = Rule(lambda x: 0 < x < 1, "lie between 0 and 1", "0.25: a quarter of the rate")
_AT_LEAST_ONE = Rule(lambda x: x >= 1, "be a factor of at least 1", "2.0")


@dataclass(frozen=True)
class Rollback:
    """What to do when a run has diverged: restore the best consensus and continue with lower learning rates.

    Args:
        window: number of steps to smooth the loss over; see `docs/safety.md`.
        cut: factor on the scales of the learning rates.
        most: number of rollbacks before the run ends with an error.
        every: minimum number of steps between two snapshots.

    >>> Rollback(most=0)
    Traceback (most recent call last):
    ValueError: most must be at least 1 rollbacks, got 0; write for example 100
    """

    window: int = 100
    cut: float = 0.25
    most: int = 5
    every: int = 100

    def __post_init__(self) -> None:
        check_count("window", self.window)
        check_number("cut", self.cut, _CUT)
        check_count("most", self.most, unit="rollbacks")
        check_count("every", self.every)


@dataclass(frozen=True)
class Limits:
    """How far any controller may move a scale.

    Hyperparameters also stay within their own bounds. The limit per round does not apply to `find_lr` and rollbacks.

    Args:
        per_round: largest factor by which a scale changes in a round, up or down.
        overall: a scale stays between 1 / overall and overall.

    >>> Limits(per_round=2.0, overall=100.0).bounded(50.0, before=1.0)
    2.0
    """

    per_round: float = 4.0
    overall: float = 1e6

    def __post_init__(self) -> None:
        check_number("per_round", self.per_round, _AT_LEAST_ONE)
        check_number("overall", self.overall, _AT_LEAST_ONE)

    def bounded(self, scale: float, before: float) -> float:
        """Clip `scale`, coming from `before`, to the limits; a scale that is already outside may move back."""
        scale = min(max(scale, before / self.per_round), before * self.per_round)
        if scale == before:
            return scale  # not moved
        return min(max(scale, min(1 / self.overall, before)), max(self.overall, before))


@dataclass(frozen=True)
class Safety:
    """How an ensemble handles numbers that are not finite, runs that diverge and replicas that are lost.

    Args:
        guard: leave out what is not finite. If a gradient is not finite, all replicas skip the step; a replica whose
            weights, optimizer state or score are not finite is left out of the average and receives it. See
            docs/safety.md for the cost.
        rollback: what to do when the run diverges: an `hdet.Rollback`, or True for `hdet.Rollback()`; None to do
            nothing. Needs the losses, and one small gather at the end of each round. Data and schedule do not rewind.
        limits: how far any controller may move a scale, per round and overall; by default `hdet.Limits()`.
        atomic: if a replica is lost during averaging, leave the others' weights unchanged. Costs a copy of the weights.

    >>> Safety(rollback=True).rollback
    Rollback(window=100, cut=0.25, most=5, every=100)
    """

    guard: bool = False
    rollback: Rollback | bool | None = None
    limits: Limits | None = None
    atomic: bool = False

    def __post_init__(self) -> None:
        check_flag("guard", self.guard)
        check_flag("atomic", self.atomic)
        if isinstance(self.rollback, bool):
            object.__setattr__(self, "rollback", Rollback() if self.rollback else None)
        if not (self.rollback is None or isinstance(self.rollback, Rollback)):
            raise TypeError(f"rollback must be an hdet.Rollback, got {self.rollback!r}; write rollback=hdet.Rollback()")
        if self.limits is None:
            object.__setattr__(self, "limits", Limits())
        if not isinstance(self.limits, Limits):
            raise TypeError(f"limits must be an hdet.Limits, got {self.limits!r}; write hdet.Limits(per_round=2.0)")

    def told(self) -> dict[str, object]:
        """The options that must be equal on all replicas, by name."""
        return {f"safety.{option.name}": getattr(self, option.name) for option in fields(self)}
