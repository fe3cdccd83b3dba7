"""The paper's controller: replicas vote for their values, weighted by a softmax of their losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hdet._arguments import Rule, check_number
from hdet.controllers.confidence import NOTHING, new_mean, new_scatter, standard_error
from hdet.controllers.report import Observation, Report, State

RULES = {
    "temperature": Rule(lambda x: 0 < x < math.inf, "be positive and finite", "0.1"),
    "step_size": Rule(lambda x: 0 <= x < math.inf, "be at least 0 and finite", "0.5"),
    "momentum": Rule(lambda x: 0 <= x < 1, "lie in [0, 1)", "0.9"),
    "warmup_steps": Rule(lambda x: 0 <= x < math.inf, "be at least 0", "1000"),
    "max_scale": Rule(lambda x: 1 <= x < math.inf, "be at least 1 and finite", "10.0"),
}


@dataclass(frozen=True)
class Softmax:
    """Move each center towards the values of the replicas with the lower losses, with momentum.

    With L_r the score (the probe's, where there is one) and eta_r the value of replica r, at the end of each
    full round:

        w = softmax((mean(L) - L_r) / temperature)
        Delta = sum_r w_r eta_r - mean_r eta_r                      the hypergradient
        v <- momentum * v + (1 - momentum) * Delta                  the velocity
        center <- center * next_base / base + step_size * v

    The velocity is relative to the base, so it shrinks and grows with the schedule. Replicas with a score that is not
    finite are left out. The center stays between its hyperparameter's floor and `max_scale` times the schedule; at
    either limit an outward velocity is dropped.

    Confidence: in each round the replicas vote for the factor exp(sum_r (w_r - 1/N) log rho_r) on the center, where
    rho_r are their multipliers. `estimate` is the mean logarithm of that factor, weighted over past rounds by
    `momentum`, and `error` its standard error. It cannot exceed the spread, because replicas vote among tried values.

    Args:
        temperature: the loss difference that makes the odds e to 1; sigma in the paper.
        step_size: fraction of the velocity to apply; lambda in the paper.
        momentum: fraction of the velocity to keep, in [0, 1); beta in the paper.
        warmup_steps: rounds that end before this step move nothing.
        max_scale: upper limit of the center, as a multiple of the schedule.

    >>> controller = Softmax(temperature=0.1)
    >>> controller.init(["learning_rate"])["learning_rate"]
    {'scale': 1.0, 'hypergradient': 0.0, 'velocity': 0.0, 'rounds': 0.0, 'scatter': 0.0, 'estimate': 0.0, 'error': inf}
    """

    temperature: float = 0.002
    step_size: float = 0.5
    momentum: float = 0.9
    warmup_steps: int = 0
    max_scale: float = 10.0

    needs_score = True

    def __post_init__(self) -> None:
        for name, rule in RULES.items():
            check_number(name, getattr(self, name), rule)

    def init(self, names: Sequence[str]) -> State:
        """Every scale is 1, every hypergradient and velocity (relative to the base) is 0."""
        entry = {"scale": 1.0, "hypergradient": 0.0, "velocity": 0.0, "rounds": 0.0, "scatter": 0.0, **NOTHING}
        return {name: dict(entry) for name in names}

    def update(self, state: State, report: Report) -> State:
        """The scales and velocities after one full round."""
        if report.step < self.warmup_steps:
            return state
        excess = self.excess_weights(report.judged)
        return {name: self._move(entry, report.observations[name], excess) for name, entry in state.items()}

    def excess_weights(self, scores: Sequence[float]) -> list[float]:
        """w_r - 1/n over the n replicas with a finite score, 0 for the others; all exactly 0 on a tie."""
        finite = [score for score in scores if math.isfinite(score)]
        if not finite:
            return [0.0] * len(scores)
        best = min(finite)
        odds = [math.exp((best - s) / self.temperature) if math.isfinite(s) else 0.0 for s in scores]
        total = sum(odds)
        return [odd / total - 1 / len(finite) if math.isfinite(s) else 0.0 for odd, s in zip(odds, scores, strict=True)]

    def _move(self, entry: dict[str, float], seen: Observation, excess: Sequence[float]) -> dict[str, float]:
        if not (seen.base > 0 and seen.next_base > 0):
            return entry
        # Everything below is divided by the base: a tie leaves the scale exactly as it was.
        scale = max(entry["scale"], min(1.0, seen.floor / seen.base))
        hypergradient = scale * sum(e * m for e, m in zip(excess, seen.multipliers, strict=True))
        velocity = self.momentum * entry["velocity"] + (1 - self.momentum) * hypergradient
        moved = scale + self.step_size * velocity * (seen.base / seen.next_base)
        lowest = min(1.0, seen.floor / seen.next_base)
        limited = min(max(moved, lowest), self.max_scale)
        if limited <= 0.0:  # no floor: halve instead of reaching 0
            limited = scale / 2
        found = self._confidence(entry, seen, excess)
        kept = velocity if limited == moved else 0.0
        return {**entry, **found, "scale": limited, "hypergradient": hypergradient, "velocity": kept}

    def _confidence(self, entry: dict[str, float], seen: Observation, excess: Sequence[float]) -> dict[str, float]:
        """The entries `rounds`, `scatter`, `estimate` and `error` with this round's vote; none if there was no vote."""
        if not seen.explored or min(seen.multipliers) <= 0 or not any(excess):
            return {}
        vote = sum(e * math.log(m) for e, m in zip(excess, seen.multipliers, strict=True))
        rounds, mean = entry["rounds"] + 1, entry["estimate"]
        after = new_mean(mean, vote, rounds, self.momentum)
        scatter = new_scatter(entry["scatter"], vote, mean, after, self.momentum)
        error = standard_error(scatter, rounds, self.momentum)
        return {"rounds": rounds, "scatter": scatter, "estimate": after, "error": error}
