"""One record per round: the values tried, their scores, and the new centers.

`json_lines.py` writes records to a file, `trackers/` to experiment trackers; any callable can be a sink.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

_SHOWN_REPLICAS = 16  # more replicas than that are summarised by their range


@dataclass(frozen=True)
class HyperparameterRecord:
    """One hyperparameter in one round.

    Attributes:
        base: the schedule's value at the round's last step.
        center: base times scale, as used in training.
        values: center times multiplier, by replica.
        scale: the factor on the schedule from the next step on.
        proposed_scale: the controller's request; differs from `scale` with `observe_only`, and after a rollback.
        memory: the controller's memory of it, by name: velocities, fits.
        estimate: the logarithm of the factor by which the scale is off, if the controller estimates it.
        error: the standard error of the estimate.
        finding: the estimate in words: "learning_rate: x1.80 +- 0.20".
        scale_before: the factor on the schedule in this round; None if unknown.
        places: where the value is stored: "0/1/lr" is the learning rate of the first optimizer's second group,
            "0/0/betas/0" is Adam's beta1; values that the forward pass reads have names of their own.
        first: the center in each of these places at the round's first step; empty after a resume in mid-round.
        last: the center in each of these places at the round's last step.
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
    scale_before: float | None = None
    places: tuple[str, ...] = ()
    first: tuple[float, ...] = ()
    last: tuple[float, ...] = ()

    @property
    def explored(self) -> bool:
        """Whether the replicas had different values."""
        return min(self.values) != max(self.values)

    @property
    def decision(self) -> str:
        """The change of the scale in words: "raised by 12 %"."""
        if self.scale_before is None:
            return ""
        done = _change(self.scale_before, self.scale)
        asked = _change(self.scale_before, self.proposed_scale)
        return done if asked in (done, "kept") else f"{done}, would have been {asked}"


@dataclass(frozen=True)
class SearchRecord:
    """The search for the learning rate before the first step; the fields of `hdet.FoundRate`.

    Attributes:
        rate: the rate found, for the first parameter group with a rate.
        start: the rate before the search.
        interval: (lo, hi), the rates between which losses were low.
        whole: the interval as counted for the rate.
        factor: the rate divided by the geometric mean of `whole`.
        first_loss: the probe's loss at the initial weights.
        coarse: (rate, probe loss) along the first ramp.
        fine: (rate, probe loss) along the second ramp.
        steps: optimizer steps taken.
        cost: total cost of the search, in training steps.
        seconds: duration of the search; not part of `round_seconds`.
        doubts: reasons to doubt the result, in words; empty if there are none.
    """

    rate: float
    start: float
    interval: tuple[float, float]
    whole: tuple[float, float]
    factor: float
    first_loss: float
    coarse: tuple[tuple[float, float], ...] = field(repr=False)
    fine: tuple[tuple[float, float], ...] = field(repr=False)
    steps: int
    cost: float
    seconds: float
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class RoundRecord:
    """One round. Equal on all replicas, except for the seconds, `replica`, and each one's own losses if nothing is
    gathered.

    Attributes:
        round: index of the round, from 0.
        step: optimizer steps taken when it ended.
        full: False for a round cut short by `converge()` or by the end of the run; the controller ignores it.
        scores: mean loss of each replica; NaN if no loss was given or nothing was gathered.
        hyperparameters: by name.
        probe: loss of each replica's last weights on the round's probe; None without a probe.
        start: probe loss of the weights at the start of the round; None if not measured.
        round_seconds: from the end of the previous round to the end of this one, on this replica.
        converge_seconds: the part of `round_seconds` spent on comparing, averaging and the controller.
        probe_seconds: the part of `round_seconds` spent on the probe.
        events: other events, in words: a rollback, a controller's choice and the reason.
        steps: optimizer steps of this round.
        total_steps: optimizer steps of the whole run, if known.
        last: whether it is the run's last record. A `finish()` at a round's end adds a last record of 0 steps.
        outer_step: fraction of a round's weight change that the run applies; None if unknown.
        outer_momentum: fraction of earlier rounds' changes applied again, with `Nesterov`; None if unknown.
        tail_average: whether the run ended with its tail average; None if it had none.
        gradients: "shared" or "local"; None if unknown.
        trend: "falls" if the losses are lower than at the start by more than their noise; "back" if they were lower
            but no longer are; "risen" if they were as clearly higher and have not fallen by a tenth of that rise;
            "flat" otherwise. Empty if it is too early or too noisy to say, and without losses.
        first_loss: mean loss of the run's first step, over the replicas, or this one's if nothing is gathered.
        level: the median of the last rounds' mean losses.
        lowest, highest: the lowest and highest level so far.
        loss: this replica's mean training loss over this round and earlier rounds without a `loss`, if nothing was
            gathered. Reading it from a device blocks, so that happens only a few times per second. None if `scores`
            has the loss, or if no loss was given.
        search: the search before the first step, in the first record; None without a search.
        replica: the replica that received the record, from 0, or the rank within a sharded one; None if read from a
            file.
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
    steps: int = 0
    total_steps: int | None = None
    last: bool = False
    outer_step: float | None = None
    outer_momentum: float | None = None
    tail_average: bool | None = None
    gradients: str | None = None
    trend: str = ""
    first_loss: float | None = None
    level: float | None = None
    lowest: float | None = None
    highest: float | None = None
    loss: float | None = None
    search: SearchRecord | None = None
    replica: int | None = field(default=None, compare=False)

    @property
    def judged(self) -> tuple[float, ...]:
        """The losses to compare replicas by: the probe's, or the training losses without a probe."""
        return self.scores if self.probe is None else self.probe

    @property
    def best(self) -> int | None:
        """The replica with the lowest loss; None if no loss is finite."""
        finite = [(loss, replica) for replica, loss in enumerate(self.judged) if math.isfinite(loss)]
        return min(finite)[1] if finite else None


OnRound: TypeAlias = Callable[[RoundRecord], object]
"""A sink for records: any callable."""


def metrics(record: RoundRecord) -> dict[str, float]:
    """A record as a flat dict of finite numbers, for any experiment tracker.

    >>> rate = HyperparameterRecord(0.1, 0.2, (0.18, 0.22), 2.5, 2.5, scale_before=2.0)
    >>> record = RoundRecord(0, 10, True, (1.0, 3.0), {"learning_rate": rate}, round_seconds=2.0, probe_seconds=0.5)
    >>> flat = metrics(record)
    >>> flat["loss/mean"], flat["loss/best_replica"], flat["learning_rate/center"], flat["overhead"]
    (2.0, 0.0, 0.2, 0.25)
    """
    found: dict[str, float | None] = {"round": record.round, **_spread("loss", record.scores)}
    if record.probe is not None:
        found |= {**_spread("probe", record.probe), "probe/consensus": record.start}
    found |= {"loss/best_replica": record.best, "loss/own": record.loss}
    for name, row in record.hyperparameters.items():
        low, high = min(row.values, default=None), max(row.values, default=None)
        told = {"base": row.base, "center": row.center, "scale": row.scale, "lowest": low, "highest": high}
        found |= {f"{name}/{key}": value for key, value in told.items()}
        found |= {f"{name}/estimate": row.estimate, f"{name}/error": row.error}
    for part in ("round", "converge", "probe"):
        found[f"seconds/{part}"] = getattr(record, f"{part}_seconds")
    if record.round_seconds > 0:
        found["overhead"] = (record.converge_seconds + record.probe_seconds) / record.round_seconds
    found["events"] = len(record.events)
    if record.search is not None:
        found |= {f"search/{key}": value for key, value in _searched(record.search).items()}
    return {key: float(value) for key, value in found.items() if value is not None and math.isfinite(value)}


def _searched(search: SearchRecord) -> dict[str, float]:
    """The numbers of a search: what was found, how many times the rate before, what it cost, and 1 for no doubts."""
    told = {"rate": search.rate, "scale": search.rate / search.start, "cost": search.cost, "seconds": search.seconds}
    return {**told, "sure": float(not search.doubts)}


def _spread(name: str, losses: tuple[float, ...]) -> dict[str, float | None]:
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not finite:
        return {}
    told: dict[str, float | None] = {
        f"{name}/mean": math.fsum(finite) / len(finite),
        f"{name}/lowest": min(finite),
        f"{name}/highest": max(finite),
    }
    if len(losses) <= _SHOWN_REPLICAS:
        told |= {f"{name}/replica_{replica}": loss for replica, loss in enumerate(losses)}
    return told


def _change(before: float, after: float) -> str:
    if before == after:
        return "kept"
    if not (before > 0 and after > 0):
        return f"moved from x{before:.3g} to x{after:.3g}"
    factor = after / before
    way, size = ("raised", factor) if factor > 1 else ("lowered", 1 / factor)
    return f"{way} x{size:.3g}" if size >= 2 else f"{way} by {100 * abs(factor - 1):.2g} %"
