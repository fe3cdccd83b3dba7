"""The recommended controller: it picks a method for each hyperparameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hdet._arguments import Rule, check_count, check_number
from hdet._explore.hyperparameter import is_of
from hdet.controllers.line_search import LineSearch
from hdet.controllers.report import Plan, Report, State
from hdet.controllers.slope import Slope

_RULES = {
    "short": Rule(lambda x: 0 <= x < math.inf, "be at least 0, a number of optimizer steps", "500"),
    "outer_step": Rule(lambda x: 0 < x <= 1, "lie in (0, 1]", "0.5"),
    "tail_average": Rule(lambda x: 0 <= x <= 1, "lie in [0, 1], a part of the run", "0.5"),
}
_LEAST_TAIL = 2000  # least steps of a run with a tail average: in shorter ones the comparison costs too much


@dataclass(frozen=True)
class Auto:
    """Learning rates by a line search in short runs and before the run in long ones; everything else by slopes.

    - Learning rates (`learning_rate`, and `learning_rate/...` by parameter group) in a run of at most `short` steps on
      several replicas: the neutral `LineSearch`.
    - Learning rates in longer runs, in runs of unknown length, and with one replica, which has nothing to compare:
      found before the first step, then left to the schedule and not fanned out. Late in a long run a round says nothing
      about the rate.
    - Every other hyperparameter: `Slope`.

    Designs: a line search is valid only if one hyperparameter varies at a time. So when a short run explores a learning
    rate and anything else, they take turns: each round explores one hyperparameter, and only its controller learns from
    the round. Long runs use slopes only; they share every round, orthogonally.

    Args:
        line_search: moves learning rates in short runs.
        slope: moves all other hyperparameters.
        short: the most steps of a short run.
        finds: whether to find the rate of a long run; False if you know it.
        outer_step: fraction of a round's weight change to apply at converge, in long runs with a learning rate. One
            half tolerates rates that are too high, so a higher rate is found: docs/research.md.
        tail_average: part of the run at its end whose round ends are averaged, in such runs of at least 2,000 steps.
            When the run ends, the probe decides whether to move halfway from the last weights to that mean. 0 turns it
            off and saves a copy of the weights.
        interval: optimizer steps per round in those runs.

    >>> Auto().plan(["learning_rate", "weight_decay"], 400).design
    'turns'
    >>> Auto().plan(["learning_rate"], 8000).finds, Auto().plan(["learning_rate"], 400, replicas=1).finds
    (True, True)
    """

    line_search: LineSearch = field(default_factory=LineSearch)
    slope: Slope = field(default_factory=Slope)
    short: int = 500
    finds: bool = True
    outer_step: float = 1.0
    tail_average: float = 0.5
    interval: int = 10

    needs_score = False
    needs_probe = True

    def __post_init__(self) -> None:
        if not isinstance(self.line_search, LineSearch):
            raise TypeError(f"line_search must be a LineSearch, got {self.line_search!r}; write LineSearch()")
        if not isinstance(self.slope, Slope):
            raise TypeError(f"slope must be a Slope, got {self.slope!r}; write Slope()")
        for name, rule in _RULES.items():
            check_number(name, getattr(self, name), rule)
        check_count("interval", self.interval)

    def plan(self, names: Sequence[str], total_steps: int | None, replicas: int | None = None) -> Plan:
        """Pick a method for each hyperparameter and the rounds that it needs; `replicas=None` stands for several."""
        rates, others = _rates(names), _others(names)
        slope = self.slope.plan(others, total_steps)
        if not rates:
            return slope
        if self._is_short(total_steps) and replicas != 1:
            search = self.line_search.plan(rates, total_steps)
            why = f"; a run of {total_steps} steps is short enough for that (at most {self.short})"
            return replace(
                search,
                design="turns" if len(names) > 1 else search.design,
                why={**{name: search.why[name] + why for name in rates}, **slope.why},
            )
        length = "a run of unknown length" if total_steps is None else f"a run of {total_steps} steps"
        where = "to be found before the first step, then left" if self.finds else "left"
        because = (
            f"in {length} a line search costs more than it gains (it is for at most {self.short} steps), and late "
            "rounds say nothing about the rate"
        )
        if self._is_short(total_steps):
            because = "one replica leaves a line search nothing to compare"
        why = f"{where} to the schedule: {because}"
        if self.outer_step < 1:
            why += (
                f"; converge takes {self.outer_step:g} of each round's update, which tolerates rates that are too high"
            )
        return replace(
            slope,
            interval=self.interval,
            outer_step=self.outer_step,
            tail_average=0.0 if total_steps is None or total_steps < _LEAST_TAIL else self.tail_average,
            until=dict.fromkeys(rates, 0),
            finds=self.finds,
            why={**dict.fromkeys(rates, why), **slope.why},
        )

    def init(self, names: Sequence[str]) -> State:
        """The entries of `LineSearch` for learning rates, those of `Slope` for the others."""
        entries = {**self.line_search.init(_rates(names)), **self.slope.init(_others(names))}
        return {name: entries[name] for name in names}

    def update(self, state: State, report: Report) -> State:
        """The state after one full round, each part by its own controller."""
        moved = dict(state)
        if self._is_short(report.total_steps):
            moved.update(_delegate(self.line_search, _rates(list(state)), state, report))
        moved.update(_delegate(self.slope, _others(list(state)), state, report))
        return moved

    def _is_short(self, total_steps: int | None) -> bool:
        return total_steps is not None and total_steps <= self.short


def _delegate(controller: LineSearch | Slope, names: Sequence[str], state: State, report: Report) -> State:
    """Update the given hyperparameters with `controller`, as if there were no others."""
    own = replace(report, observations={name: report.observations[name] for name in names})
    return controller.update({name: state[name] for name in names}, own)


def _rates(names: Sequence[str]) -> list[str]:
    return [name for name in names if is_of(name, "learning_rate")]


def _others(names: Sequence[str]) -> list[str]:
    rates = set(_rates(names))
    return [name for name in names if name not in rates]
