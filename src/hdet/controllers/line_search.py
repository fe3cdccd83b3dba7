"""The line search: with shared gradients a round's replicas lie on a line, and a probe shows the loss along it.

See `docs/controllers.md` for when the line search is informative and when it is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from hdet._arguments import Rule, check_count, check_number
from hdet.controllers.confidence import (
    NOTHING,
    VAGUE,
    effective_rounds,
    new_co_scatter,
    new_mean,
    new_scatter,
    total_weight,
    variance_of_mean,
    widened,
)
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
_SCATTER = ("slope_scatter", "co_scatter", "curvature_scatter")
_SUMS = (*_SCATTER, "products")
_KNOWN = 2.0  # standard errors between A or B and 0 for the vertex to be known
_CLEAR = 3.0  # the same for a slope: one more, because dividing by |a| + |b| shifts B when noise is large


@dataclass(frozen=True)
class LineSearch:
    """Move a learning rate towards the lowest loss along the line that the round's replicas lie on.

    With shared gradients theta_r = theta_0 + rho_r D, where rho_r is the multiplier of replica r. Let L_r be the probe
    loss of its last weights and L_0 that of the weights at the start of the round, on the same data:

        L_r - L_0 = a rho_r + b rho_r^2              least squares over the replicas; exact for two
        (a, b) <- (a, b) / (|a| + |b|)               so that all rounds weigh the same
        A, B = their means over rounds, the last one with the weight 1 - smoothing, bias-corrected
        R = -A / 2B                                  the vertex; `reach` if B <= 0 > A, 1 / `reach` if A >= 0
        d = log(R / target)
        scale <- scale * exp(max(0, 2 h - 1) * clip(step_size * d, -max_step, max_step))

    The target is the value of R to reach. At R = 1 the round ended at the lowest point of its line: the "greedy"
    target, which is short-sighted and ends with small rates. At R = 1/2 the round went twice as far and neither gained
    nor lost: "neutral". While the schedule rises, it will raise the rate by itself, so with f = base / peak
    d <- max(0, d + log f) if d > 0. While it falls, it anneals the rate, which a round's line cannot account for: with
    h = base / highest base so far, the step shrinks by 2 h - 1, up and down alike, and below half of the highest base
    the scale stays. So relative to its peak the rate ends at most twice as high as the schedule.

    When the step size changes by a factor q, A and B become A q and B q^2: the same line, measured in new steps. A
    negative B is not rescaled: on a hill the scale rises as fast as allowed, and B q^2 would then outweigh all later
    rounds for good. `hills=True` rescales it anyway.

    It works on learning rates only. Several rates, one per parameter group, take turns, because the fit is valid only
    if one varies at a time. During such a turn the other groups move too: L_0 does not lie on the group's line, so the
    fit has a free intercept instead, which takes three replicas. A round that does not explore a rate leaves it alone.
    Without `probe` and `start` in the report nothing changes.

    Confidence: `estimate` is d, and `error` the standard error of log R, from the scatter of a and b over rounds and
    their covariance, widened for few rounds. If A or B is within two standard errors of 0, or R beyond `reach`, the
    vertex is unknown. Then follow the slope A + 2 B t from t = target in the direction of d: while it is three standard
    errors from 0, the vertex lies beyond. `error` is half the distance from the end of that stretch to d, at least 1/2,
    and `finding` says "at least" or "at most" d -+ 2 `error`. `error` is infinite if the slope is unclear even at the
    target.

    Args:
        target: "neutral" or "greedy".
        active: part of the run in which it explores and acts, if the run's length is known.
        smoothing: fraction of A and B kept from round to round, in [0, 1).
        step_size: fraction of d to apply in one round.
        max_step: largest change of log(scale) in one round.
        hills: rescale a negative B with the step size too, to compare with the plain formula; it can run away.
        reach: limits R to between 1 / reach and reach.
        max_scale: limits the scale to between 1 / max_scale and max_scale.
        interval: optimizer steps per round.

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

        `slope` and `curvature` are A and B, `at` is the step size (base * scale) that they were measured at, `highest`
        the highest base so far. The scatters are the weighted sums over rounds of (a - A)^2, (a - A) (b - B) and
        (b - B)^2. `products` is the sum of a b with squared weights. `target` is stored only for the records.
        """
        seen = {"slope": 0.0, "curvature": 0.0, "at": 0.0, "highest": 0.0, "rounds": 0.0, **dict.fromkeys(_SUMS, 0.0)}
        return {name: {"scale": 1.0, "target": _VERTEX[self.target], **seen, **NOTHING} for name in names}

    def update(self, state: State, report: Report) -> State:
        """The scales after one full round."""
        late = report.total_steps is not None and report.step > self._until(report.total_steps)
        if late:
            return state
        state = {name: _with_highest(entry, report.observations[name].base) for name, entry in state.items()}
        if report.probe is None or report.start is None:  # the first round, for one: its base counts all the same
            return state
        rises = [loss - report.start for loss in report.probe]
        fitted = fit if len(state) == 1 else fit_with_intercept
        return {name: self._move(entry, report.observations[name], rises, fitted) for name, entry in state.items()}

    def _until(self, total_steps: int) -> int:
        return round(self.active * total_steps)

    def _move(self, entry: dict[str, float], seen: Observation, rises: Sequence[float], fit: Fit) -> dict[str, float]:
        fitted = fit(seen.multipliers, rises) if seen.explored else None
        share = 2 * seen.base / entry["highest"] - 1 if entry["highest"] > 0 else 0.0
        if fitted is None or share <= 0:
            return entry
        carried = self._carried(entry, seen.base * entry["scale"])
        after = self._averaged(carried, *fitted)
        if after["slope"] == 0.0 and after["curvature"] == 0.0:
            return after
        found = math.log(self._vertex(after["slope"], after["curvature"]) / _VERTEX[self.target])
        distance = found
        if distance > 0 and seen.peak and seen.next_base > seen.base:
            distance = max(0.0, distance + math.log(seen.base / seen.peak))
        step = share * min(max(self.step_size * distance, -self.max_step), self.max_step)
        # Neither moved nor bounded: this round has no say over a scale that was put outside its limits.
        before = entry["scale"]
        scale = seen.bounded(before * math.exp(step), self.max_scale, before) if step else before
        return {**after, "scale": scale, "estimate": distance, "error": self._error(after, found)}

    def _carried(self, entry: dict[str, float], at: float) -> dict[str, float]:
        """Rescale A, B and their scatter to this round's step size `at`.

        This waits until now because the step size was unknown at the end of the last round: the schedule has moved on,
        and the scale stayed if the ensemble only observes.
        """
        q = at / entry["at"] if entry["at"] > 0 else 1.0
        grown = q**2 if self.hills or entry["curvature"] > 0 else min(q**2, 1.0)
        factors = zip(_SUMS, (q * q, q * grown, grown * grown, q * grown), strict=True)
        sums = {key: entry[key] * factor for key, factor in factors}
        return {**entry, "slope": entry["slope"] * q, "curvature": entry["curvature"] * grown, "at": at, **sums}

    def _averaged(self, entry: dict[str, float], a: float, b: float) -> dict[str, float]:
        """Add this round's fit to A, B and their scatter."""
        size = abs(a) + abs(b)
        a, b = (a / size, b / size) if size else (0.0, 0.0)
        rounds, memory = entry["rounds"] + 1, self.smoothing
        slope = new_mean(entry["slope"], a, rounds, memory)
        curvature = new_mean(entry["curvature"], b, rounds, memory)
        aa, ab, bb, products = (entry[key] for key in _SUMS)
        sums = (
            new_scatter(aa, a, entry["slope"], slope, memory),
            new_co_scatter(ab, a, entry["slope"], b, curvature, memory),
            new_scatter(bb, b, entry["curvature"], curvature, memory),
            memory**2 * products + a * b,
        )
        means = {"slope": slope, "curvature": curvature, "rounds": rounds}
        return {**entry, **means, **dict(zip(_SUMS, sums, strict=True))}

    def _vertex(self, slope: float, curvature: float) -> float:
        if slope >= 0:
            return 1 / self.reach
        if curvature <= 0:
            return self.reach
        return self._within(-slope / (2 * curvature))

    def _error(self, entry: dict[str, float], distance: float) -> float:
        """The standard error of log(vertex); if unknown, the error that makes `distance` a bound, see the class."""
        a, b = entry["slope"], entry["curvature"]
        aa, ab, bb = (variance_of_mean(entry[key], entry["rounds"], self.smoothing) for key in _SCATTER)
        if math.isinf(aa):
            return math.inf
        known = a < -_KNOWN * math.sqrt(aa) and b > _KNOWN * math.sqrt(bb)
        if known and 1 / self.reach < -a / (2 * b) < self.reach:
            return self._error_of_vertex(entry)
        target = _VERTEX[self.target]
        if distance * (a + 2 * b * target) >= 0:  # on a hill there is no vertex
            return math.inf
        end = clear_until(target, distance > 0, (a, 2 * b), (aa, 2 * ab, 4 * bb))
        if end == target:
            return math.inf
        return max(VAGUE, abs(distance - math.log(self._within(end) / target)) / 2)

    def _error_of_vertex(self, entry: dict[str, float]) -> float:
        """The standard error of log(-A / 2B).

        Carried over to other step sizes, rounds differ in size: (a, b) is c (A, B), with the same vertex. That is not
        noise and cancels, but A and B then rest on fewer rounds: the weights are w c, not w.
        """
        a, b = entry["slope"], entry["curvature"]
        aa, ab, bb = (entry[key] for key in _SCATTER)
        total, rounds = (of(entry["rounds"], self.smoothing) for of in (total_weight, effective_rounds))
        squares = entry["products"] / a / b  # the sum of (w c)^2; that of w c is the total weight
        free = max((min(rounds, total**2 / squares) if squares > 0 else rounds) - 1, 0.5)
        scatter = aa / a / a - 2 * ab / a / b + bb / b / b
        return widened(math.sqrt(max(0.0, scatter) / (total * free)), free)

    def _within(self, vertex: float) -> float:
        return min(max(vertex, 1 / self.reach), self.reach)


def _with_highest(entry: dict[str, float], base: float) -> dict[str, float]:
    """The entry with `highest` raised to `base`; the same entry if `base` is not higher."""
    return {**entry, "highest": base} if base > entry["highest"] else entry


def clear_until(start: float, up: bool, line: tuple[float, float], variance: tuple[float, float, float]) -> float:
    """The first t from `start` on, upwards or downwards, where x + y t is within three standard errors of 0.

    Args:
        start: returned if the line is that close to 0 already.
        up: whether to go upwards; if there is no such t, the result is inf upwards and -inf downwards.
        line: x and y.
        variance: variance of x, covariance of x and y, variance of y.

    >>> clear_until(0.5, True, (-1.0, 0.1), (0.04, 0.0, 0.0))    # -1 + 0.1 t, +- 0.2
    4.0
    """
    (x, y), (xx, xy, yy) = line, (_CLEAR**2 * v for v in variance)
    low, middle, high = x * x - xx, x * y - xy, y * y - yy  # clear where low + 2 middle t + high t^2 > 0
    if low + 2 * middle * start + high * start * start <= 0:
        return start
    inner = middle * middle - low * high
    root = -(middle + math.copysign(math.sqrt(max(0.0, inner)), middle))  # adds what has the same sign
    roots = [over / under for over, under in ((root, high), (low, root)) if under and inner >= 0]
    if up:
        return min((t for t in roots if t > start), default=math.inf)
    return max((t for t in roots if t < start), default=-math.inf)


def fit(multipliers: Sequence[float], rises: Sequence[float]) -> tuple[float, float] | None:
    """a and b of rises = a rho + b rho^2, by least squares over the finite rises; None if they do not determine both.

    Makes rho^2 orthogonal to rho first, for precision when the multipliers are close together.
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
