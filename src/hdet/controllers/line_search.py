"""The line search: with shared gradients a round's replicas lie on a line, and a probe shows the loss along it.

Read `docs/controllers.md` for when it says something and when it does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from hdet.arguments import Rule, check_count, check_number
from hdet.controllers.evidence import NOTHING, new_mean, new_scatter, standard_error
from hdet.controllers.report import Observation, Plan, Report, State

_RULES = {
    "active": Rule(lambda x: 0 <= x <= 1, "lie in [0, 1], the part of the run in which it acts", "0.5"),
    "smoothing": Rule(lambda x: 0 <= x < 1, "lie in [0, 1)", "0.8"),
    "step_size": Rule(lambda x: 0 <= x < math.inf, "be at least 0 and finite", "0.5"),
    "max_step": Rule(lambda x: 0 < x <= 10, "lie in (0, 10]", "0.5"),
    "reach": Rule(lambda x: 1 < x < math.inf, "be more than 1 and finite", "1000.0"),
    "max_scale": Rule(lambda x: 1 <= x < math.inf, "be at least 1 and finite", "1e6"),
}
Fit = Callable[[Sequence[float], Sequence[float]], "tuple[float, float] | None"]
_VERTEX = {"neutral": 0.5, "greedy": 1.0}


@dataclass(frozen=True)
class LineSearch:
    """Move a learning rate by where the loss is lowest along what the round did.

    With shared gradients theta_r = theta_0 + rho_r D, rho_r being the multiplier of replica r. With L_r the loss of its
    last weights on the probe and L_0 that of the weights the round began with, on the same data:

        L_r - L_0 = a rho_r + b rho_r^2              least squares over the replicas; exact for two
        (a, b) <- (a, b) / (|a| + |b|)               so that all rounds weigh the same
        A, B = their means over rounds, the last one with the weight 1 - smoothing, bias-corrected
        R = -A / 2B                                  the vertex; `reach` if B <= 0 > A, 1 / `reach` if A >= 0
        d = log(R / target)
        scale <- scale * exp(clip(step_size * d, -max_step, max_step))

    The target is the vertex that the rate is moved to. At R = 1 the round ended at the lowest point of its line: the
    "greedy" target, which is short-sighted and ends with small rates. At R = 1/2 it went twice as far and neither
    gained nor lost: "neutral". While the schedule rises it will raise the rate by itself, so with f = base / peak
    d <- max(0, d + log f) if d > 0. When the step size changes by a factor q, A and B become A q and B q^2: the same
    line, measured in new steps. A negative B does not grow that way: on a hill the scale rises by the most it may, and
    with it B q^2 would outweigh all that later rounds can say, for good. `hills=True` lets it.

    It is for learning rates. Several, one for each parameter group, are explored in turns, as the fit is right only for
    what varied alone. In such a turn the other groups move too: L_0 does not lie on the group's line, and the fit has a
    free intercept instead, which takes three replicas. In a round in which it was not explored a rate is left alone.
    Without `probe` and `start` in the report nothing changes.

    Its confidence: `estimate` is d. A + 2 B target, the slope of the fit at the target, has the opposite sign; its
    scatter over rounds gives the standard error of the slope, and `error` is that in units of d.

    Args:
        target: "neutral" or "greedy".
        active: the part of the run in which it explores and acts, where the run's length is known.
        smoothing: how much of A and B is kept from round to round, in [0, 1).
        step_size: how much of d is taken in one round.
        max_step: the most that log(scale) moves in one round.
        hills: let a negative B grow with the step size too, to compare with the plain formula; it can run away.
        reach: R is kept between 1 / reach and reach.
        max_scale: the scale is kept between 1 / max_scale and max_scale.
        interval: optimizer steps per round that it asks for.

    >>> [round(x, 9) for x in fit((0.5, 1.0, 1.5), (-0.75, -1.0, -0.75))]    # -2 rho + rho^2
    [-2.0, 1.0]
    """

    target: Literal["neutral", "greedy"] = "neutral"
    active: float = 1.0
    smoothing: float = 0.8
    step_size: float = 0.5
    max_step: float = 0.5
    hills: bool = False
    reach: float = 1000.0
    max_scale: float = 1e6
    interval: int = 5

    needs_score = False
    needs_probe = True

    def __post_init__(self) -> None:
        if self.target not in _VERTEX:
            raise ValueError(f'target must be "neutral" or "greedy", got {self.target!r}')
        for name, rule in _RULES.items():
            check_number(name, getattr(self, name), rule)
        check_count("interval", self.interval)
        if not isinstance(self.hills, bool):
            raise TypeError(f"hills must be True or False, got {self.hills!r}")

    def plan(self, names: Sequence[str], total_steps: int | None) -> Plan:
        """Short rounds, one hyperparameter at a time, in the active part of the run."""
        until = {} if total_steps is None else dict.fromkeys(names, self._until(total_steps))
        why = f"line search ({self.target}): the probe shows the loss along what each round did"
        return Plan(
            interval=self.interval,
            design="turns" if len(names) > 1 else "permutations",
            until=until,
            needs_line=True,
            why=dict.fromkeys(names, why),
        )

    def init(self, names: Sequence[str]) -> State:
        """Every scale is 1, and no round has been seen.

        `slope` and `curvature` are A and B, `at` the step size (base * scale) that they were measured at; `target` is
        there to be seen in the records.
        """
        seen = {"slope": 0.0, "curvature": 0.0, "at": 0.0, "rounds": 0.0, "scatter": 0.0}
        return {name: {"scale": 1.0, "target": _VERTEX[self.target], **seen, **NOTHING} for name in names}

    def update(self, state: State, report: Report) -> State:
        """The scales after one full round."""
        late = report.total_steps is not None and report.step > self._until(report.total_steps)
        if late or report.probe is None or report.start is None:
            return state
        rises = [loss - report.start for loss in report.probe]
        fitted = fit if len(state) == 1 else fit_with_intercept
        return {name: self._move(entry, report.observations[name], rises, fitted) for name, entry in state.items()}

    def _until(self, total_steps: int) -> int:
        return round(self.active * total_steps)

    def _move(self, entry: dict[str, float], seen: Observation, rises: Sequence[float], fit: Fit) -> dict[str, float]:
        fitted = fit(seen.multipliers, rises) if seen.explored else None
        if fitted is None:
            return entry
        carried = self._carried(entry, seen.base * entry["scale"])
        after = self._averaged(carried, *fitted)
        if after["slope"] == 0.0 and after["curvature"] == 0.0:
            return after
        found = math.log(self._vertex(after["slope"], after["curvature"]) / _VERTEX[self.target])
        distance = found
        if distance > 0 and seen.peak and seen.next_base > seen.base:
            distance = max(0.0, distance + math.log(seen.base / seen.peak))
        step = min(max(self.step_size * distance, -self.max_step), self.max_step)
        # Not moved, not bounded: a scale that someone else has put outside is not this round's business.
        scale = seen.bounded(entry["scale"] * math.exp(step), self.max_scale) if step else entry["scale"]
        return {**after, "scale": scale, "estimate": distance, "error": self._error(after, found)}

    def _carried(self, entry: dict[str, float], at: float) -> dict[str, float]:
        """A and B in units of the step size `at`, that of this round.

        Done now and not at the end of the last round, because only now it is known what the step size became: the
        schedule has moved on, and the scale stayed if the ensemble only observes.
        """
        q = at / entry["at"] if entry["at"] > 0 else 1.0
        grown = q**2 if self.hills or entry["curvature"] > 0 else min(q**2, 1.0)
        carried = {"slope": entry["slope"] * q, "curvature": entry["curvature"] * grown, "at": at}
        return {**entry, **carried, "scatter": entry["scatter"] * q**2}

    def _averaged(self, entry: dict[str, float], a: float, b: float) -> dict[str, float]:
        """A, B and the scatter of the slope at the target, with this round's fit."""
        size = abs(a) + abs(b)
        a, b = (a / size, b / size) if size else (0.0, 0.0)
        rounds, twice = entry["rounds"] + 1, 2 * _VERTEX[self.target]
        slope = new_mean(entry["slope"], a, rounds, self.smoothing)
        curvature = new_mean(entry["curvature"], b, rounds, self.smoothing)
        before, after = (entry["slope"] + twice * entry["curvature"], slope + twice * curvature)
        scatter = new_scatter(entry["scatter"], a + twice * b, before, after, self.smoothing)
        return {**entry, "slope": slope, "curvature": curvature, "rounds": rounds, "scatter": scatter}

    def _vertex(self, slope: float, curvature: float) -> float:
        if slope >= 0:
            return 1 / self.reach
        if curvature <= 0:
            return self.reach
        return min(max(-slope / (2 * curvature), 1 / self.reach), self.reach)

    def _error(self, entry: dict[str, float], distance: float) -> float:
        """The standard error of the slope at the target, times what one unit of that slope is in `distance`."""
        twice = 2 * _VERTEX[self.target]
        slope = entry["slope"] + twice * entry["curvature"]
        error = standard_error(entry["scatter"], entry["rounds"], self.smoothing)
        if slope == 0.0:  # at the target: the limit of distance / slope
            return error / (twice * entry["curvature"]) if entry["curvature"] > 0 else math.inf
        return -distance / slope * error if distance * slope < 0 else math.inf  # on a hill there is no vertex


def fit(multipliers: Sequence[float], rises: Sequence[float]) -> tuple[float, float] | None:
    """a and b of rises = a rho + b rho^2, by least squares over the finite rises; None if they do not determine both.

    rho^2 is first made orthogonal to rho, which keeps the digits when the multipliers are close together.
    """
    points = [(rho, rise) for rho, rise in zip(multipliers, rises, strict=True) if math.isfinite(rise)]
    squares = math.fsum(rho**2 for rho, _ in points)
    if len({rho for rho, _ in points}) < 2 or squares == 0.0:
        return None
    c = math.fsum(rho**3 for rho, _ in points) / squares
    rest = [(rho * (rho - c), rise) for rho, rise in points]
    norm = math.fsum(phi**2 for phi, _ in rest)
    if norm == 0.0:
        return None
    b = sum(phi * rise for phi, rise in rest) / norm
    a = sum(rho * rise for rho, rise in points) / squares - b * c
    return (a, b) if math.isfinite(a) and math.isfinite(b) else None


def fit_with_intercept(multipliers: Sequence[float], rises: Sequence[float]) -> tuple[float, float] | None:
    """a and b of rises = c + a rho + b rho^2, by least squares over the finite rises; None for fewer than three rhos.

    >>> [round(x, 9) for x in fit_with_intercept((0.5, 1.0, 1.5), (4.25, 4.0, 4.25))]    # 5 - 2 rho + rho^2
    [-2.0, 1.0]
    """
    points = [(rho, rise) for rho, rise in zip(multipliers, rises, strict=True) if math.isfinite(rise)]
    if len({rho for rho, _ in points}) < 3:
        return None
    middle = math.fsum(rho for rho, _ in points) / len(points)
    level = math.fsum(rise for _, rise in points) / len(points)
    centred = [(rho - middle, rise - level) for rho, rise in points]
    squares = math.fsum(x**2 for x, _ in centred)
    c, spread = math.fsum(x**3 for x, _ in centred) / squares, squares / len(points)
    rest = [(x * x - spread - c * x, y) for x, y in centred]
    norm = math.fsum(phi**2 for phi, _ in rest)
    if norm == 0.0:
        return None
    b = math.fsum(phi * y for phi, y in rest) / norm
    slope = math.fsum(x * y for x, y in centred) / squares - b * c
    a = slope - 2 * b * middle
    return (a, b) if math.isfinite(a) and math.isfinite(b) else None
