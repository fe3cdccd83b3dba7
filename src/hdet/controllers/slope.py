"""The slope controller: fits how the score changes with each explored hyperparameter and steps downhill."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hdet._arguments import Rule, check_number
from hdet.controllers.confidence import NOTHING, new_mean, new_scatter, standard_error, total_weight
from hdet.controllers.report import Observation, Plan, Report, State

_RULES = {
    "step_size": Rule(lambda x: 0 <= x < math.inf, "be at least 0 and finite", "0.1"),
    "momentum": Rule(lambda x: 0 <= x < 1, "lie in [0, 1)", "0.9"),
    "smoothing": Rule(lambda x: 0 <= x < 1, "lie in [0, 1)", "0.99"),
    "evidence": Rule(lambda x: 0 <= x < math.inf, "be at least 0 and finite", "2.0"),
    "max_scale": Rule(lambda x: 1 <= x < math.inf, "be at least 1 and finite", "1e6"),
}
_MOST = 700.0  # exp() of more overflows
_ODD = 3.0  # slopes are clipped to this many times the rms of earlier rounds,
_FEW = 5  # after more than this many rounds
_SINGULAR = 1e-9  # relative to the pivot of an orthogonal design, which is 1


@dataclass(frozen=True)
class Slope:
    """Follow the slope of the score in the logarithm of each hyperparameter, all of them at once.

    With L_r the score of replica r (the probe's, where there is one) and u_hr = log of its multiplier of h:

        L_r = c + sum_h g_h u_hr                         least squares over the replicas: g_h is the slope
        m = mean over rounds of g, weights momentum^k    v = mean over rounds of g^2, weights smoothing^k
        log(scale_h) <- log(scale_h) - step_size * m_h / sqrt(v_h)

    Both means are bias-corrected; if v is 0, nothing moves. From the sixth round on, slopes are clipped to 3 sqrt(v):
    otherwise one odd loss would make v so large that nothing moves afterwards. Hyperparameters that did not vary in
    this round are neither fitted nor moved. If there are too few replicas to tell all of them apart, or the round
    happened to confound them, each is fitted alone, g_h = cov(u_h, L) / var(u_h); over many rounds the others average
    out. Replicas with a score that is not finite are left out.

    Confidence: a slope gives a direction, not a distance. `estimate` is -m / rms, the mean slope in units of the slopes
    seen: 1 (a factor e) when all rounds agree that the scale is too low, 0 when they cancel; `error` is the standard
    error of the mean in the same units. So read "x1.8 +- 0.2" as a direction and how clear it is.

    Args:
        step_size: change of log(scale) in a round when the slopes of all rounds agree.
        momentum: fraction of the mean slope kept from round to round, in [0, 1).
        smoothing: fraction of the mean square kept, in [0, 1).
        evidence: move only if the mean slope is more than this many standard errors from 0; 0 to move always.
        anneal: reduce the step size linearly to 0 over the run, if the run's length is known.
        max_scale: limits the scale to between 1 / max_scale and max_scale.

    >>> slopes([[-1.0, -1.0, 1.0, 1.0], [-1.0, 1.0, -1.0, 1.0]], [0.0, 6.0, 2.0, 8.0])
    [1.0, 3.0]
    """

    step_size: float = 0.1
    momentum: float = 0.9
    smoothing: float = 0.99
    evidence: float = 0.0
    anneal: bool = True
    max_scale: float = 1e6

    needs_score = True

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            check_number(name, getattr(self, name), rule)
        if not isinstance(self.anneal, bool):
            raise TypeError(f"anneal must be True or False, got {self.anneal!r}")

    def plan(self, names: Sequence[str], total_steps: int | None) -> Plan:
        """An orthogonal design for two or more: no round confounds their slopes."""
        why = "slopes: compares the score of higher and lower values and follows the better side"
        return Plan(design="orthogonal" if len(names) > 1 else "permutations", why=dict.fromkeys(names, why))

    def init(self, names: Sequence[str]) -> State:
        """Every scale is 1, and no round has been seen. `slope` is m, `square` is v."""
        entry = {"scale": 1.0, "slope": 0.0, "square": 0.0, "rounds": 0.0, "scatter": 0.0, **NOTHING}
        return {name: dict(entry) for name in names}

    def update(self, state: State, report: Report) -> State:
        """The scales after one full round."""
        finite = [r for r, score in enumerate(report.judged) if math.isfinite(score)]
        columns = {}
        for name in state:
            seen = report.observations[name]
            if seen.explored and min(seen.multipliers) > 0 and len({seen.multipliers[r] for r in finite}) > 1:
                columns[name] = [math.log(seen.multipliers[r]) for r in finite]
        found = dict(zip(columns, slopes(list(columns.values()), [report.judged[r] for r in finite]), strict=True))
        step_size = self.step_size
        if self.anneal and report.total_steps:
            step_size *= max(0.0, 1 - report.step / report.total_steps)
        moved = {
            name: self._move(state[name], report.observations[name], slope, step_size)
            for name, slope in found.items()
            if math.isfinite(slope * slope)
        }
        return {**state, **moved}

    def _move(self, entry: dict[str, float], seen: Observation, slope: float, step_size: float) -> dict[str, float]:
        if entry["rounds"] >= _FEW and entry["square"]:
            most = _ODD * math.sqrt(entry["square"])
            slope = min(max(slope, -most), most)
        rounds = entry["rounds"] + 1
        mean = new_mean(entry["slope"], slope, rounds, self.momentum)
        square = new_mean(entry["square"], slope * slope, rounds, self.smoothing)
        scatter = new_scatter(entry["scatter"], slope, entry["slope"], mean, self.momentum)
        after = {**entry, "slope": mean, "square": square, "rounds": rounds, "scatter": scatter}
        rms = math.sqrt(mean * mean + scatter / total_weight(rounds, self.momentum))
        if rms == 0.0 or square <= 0.0:
            return after
        error = standard_error(scatter, rounds, self.momentum)
        after.update(estimate=-mean / rms, error=error / rms)
        step = min(max(-step_size * mean / math.sqrt(square), -_MOST), _MOST)
        if step == 0.0 or (self.evidence and abs(mean) <= self.evidence * error):
            return after
        return {**after, "scale": seen.bounded(entry["scale"] * math.exp(step), self.max_scale, entry["scale"])}


def slopes(columns: Sequence[Sequence[float]], scores: Sequence[float]) -> list[float]:
    """Fit the scores to all columns with an intercept by least squares; column by column if confounded."""
    if not columns:
        return []
    size, lowest = len(scores), min(scores)
    centered = []
    for column in columns:
        mean = math.fsum(column) / size
        centered.append([u - mean for u in column])
    rises = [score - lowest for score in scores]  # exactly 0 on a tie; the columns' mean is 0, so no other centering
    norms = [math.sqrt(math.fsum(u * u for u in column)) for column in centered]
    units = [[u / norm for u in column] for column, norm in zip(centered, norms, strict=True)]
    alone = [sum(u * rise for u, rise in zip(unit, rises, strict=True)) for unit in units]
    gram = [[math.fsum(x * y for x, y in zip(one, other, strict=True)) for other in units] for one in units]
    joint = _solve(gram, alone) if size > len(columns) else None
    return [slope / norm for slope, norm in zip(alone if joint is None else joint, norms, strict=True)]


def _solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float] | None:
    """x with matrix x = right, by elimination with pivots; None if the matrix, whose diagonal is 1, is singular."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for k in range(size):
        pivot = max(range(k, size), key=lambda i: abs(rows[i][k]))
        rows[k], rows[pivot] = rows[pivot], rows[k]
        if abs(rows[k][k]) <= _SINGULAR:
            return None
        for i in range(k + 1, size):
            factor = rows[i][k] / rows[k][k]
            rows[i] = [x - factor * y for x, y in zip(rows[i], rows[k], strict=True)]
    x = [0.0] * size
    for k in reversed(range(size)):
        x[k] = (rows[k][size] - sum(rows[k][j] * x[j] for j in range(k + 1, size))) / rows[k][k]
    return x
