"""The interface of controllers: a plain state, `init` and `update`, and the report that they are given.

A controller is pure. It runs in float64 on the host and gets the same report on every replica, so it returns the same
state on every replica without communication.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hdet._arguments import Rule, check_count, check_number
from hdet._explore.slots import Design

State = dict[str, dict[str, float]]
"""By hyperparameter name: at least `scale`, plus anything else that the controller remembers."""

_ADDED = ("highest",)  # entries that older states lack: these start from their initial values


@dataclass(frozen=True)
class Observation:
    """One hyperparameter in one round.

    Attributes:
        base: the schedule's value at the round's last step.
        next_base: the schedule's value at the next step.
        floor: lower limit of the center, unless the base is lower.
        multipliers: by replica; all 1 in a round that does not explore it.
        peak: the schedule's highest value, if the scheduler exposes it (OneCycleLR does).
        limits: the scales between which no replica's value is clipped to its bounds. A scale is not moved beyond them;
            if the schedule has already led it there, it stays until the controller moves it back.
    """

    base: float
    next_base: float
    floor: float
    multipliers: tuple[float, ...]
    peak: float | None = None
    limits: tuple[float, float] = (0.0, math.inf)

    @property
    def explored(self) -> bool:
        """Whether the replicas had different values: False if it was another one's turn, or at a base of 0."""
        return self.base > 0 and min(self.multipliers) != max(self.multipliers)

    def within_limits(self, scale: float, before: float) -> float:
        """Clip `scale` to its limits. If `before` is already outside, the scale may stay there or move back."""
        low, high = self.limits
        return min(max(scale, min(low, before)), max(high, before))

    def bounded(self, scale: float, max_scale: float, before: float = 1.0) -> float:
        """Clip `scale`, coming from `before`, to its limits, to `max_scale`, and to the floor of its center."""
        lowest = min(1.0, self.floor / self.next_base) if self.next_base > 0 else 0.0
        return min(max(self.within_limits(scale, before), lowest, 1 / max_scale), max_scale)


@dataclass(frozen=True)
class Report:
    """One full round, the same on every replica.

    Attributes:
        step: optimizer steps taken since the start of the run.
        scores: mean training loss of each replica; not finite for a replica without one.
        observations: by hyperparameter name.
        total_steps: optimizer steps of the whole run, if known.
        probe: loss of each replica's last weights on the round's probe, the same data for all; None without a probe.
        start: loss of the weights at the start of the round, on the same data; None if not measured.
    """

    step: int
    scores: tuple[float, ...]
    observations: Mapping[str, Observation]
    total_steps: int | None = None
    probe: tuple[float, ...] | None = None
    start: float | None = None

    @property
    def judged(self) -> tuple[float, ...]:
        """The losses to compare replicas by: the probe's, or the training losses without a probe."""
        return self.scores if self.probe is None else self.probe


@dataclass(frozen=True)
class Plan:
    """A controller's requests for a run. The user's arguments take precedence.

    Attributes:
        interval: optimizer steps per round; None for the ensemble's default.
        outer_step: fraction of a round's weight change to apply at converge; 1 applies all of it.
        tail_average: part of the run at its end whose round ends are averaged; 0 for none.
        design: how slots are dealt to several hyperparameters.
        until: by name, the step at which a hyperparameter stops being explored; without an entry, never.
        finds: find the learning rate before the first step.
        needs_line: the replicas of a round must lie on a line, as they do when they share gradients.
        why: in words, the method picked for each hyperparameter and the reason.
    """

    interval: int | None = None
    outer_step: float = 1.0
    tail_average: float = 0.0
    design: Design = "permutations"
    until: Mapping[str, int] = field(default_factory=dict)
    finds: bool = False
    needs_line: bool = False
    why: Mapping[str, str] = field(default_factory=dict)

    def auto_interval(self, total_steps: int | None) -> int | None:
        """The value of `interval="auto"` in a run of that length; None if it depends on an unknown length.

        >>> Plan().auto_interval(4000), Plan(interval=10).auto_interval(None), Plan(interval=10).auto_interval(5)
        (20, 10, 5)
        """
        if total_steps is None:
            return self.interval
        return min(self.interval or min(max(total_steps // 200, 1), 1000), total_steps)


class Controller(Protocol):
    """Steers the scales of the explored hyperparameters; `hdet.controllers.Softmax` is a readable example.

    A controller may also have `needs_probe = True`, if it requires a probe, and `plan(names, total_steps)`, which
    returns a `Plan`. If `plan` has a third parameter `replicas`, it receives their number, or None if it is unknown.
    Records show the state entries `estimate` and `error` as the controller's confidence: the logarithm of the factor by
    which the scale is off, and its standard error.
    """

    @property
    def needs_score(self) -> bool:
        """Whether `step()` needs a loss if there is no probe."""

    def init(self, names: Sequence[str]) -> State:
        """The state before the first round: every scale is 1."""

    def update(self, state: State, report: Report) -> State:
        """The state after one full round. Must not change `state`."""


_A_PART = Rule(lambda x: 0 <= x <= 1, "lie in [0, 1]", "0.5")


def plan(controller: Controller, names: Sequence[str], total_steps: int | None, replicas: int | None = None) -> Plan:
    """The plan of `controller` for a run on that many replicas; the default plan if it has no `plan` method.

    Raises:
        TypeError, ValueError: if the plan is invalid.
    """
    own = getattr(controller, "plan", None)
    if own is None:
        return Plan()
    more = {"replicas": replicas} if "replicas" in inspect.signature(own).parameters else {}
    wanted, who = own(names, total_steps, **more), f"{type(controller).__name__}.plan"
    if not isinstance(wanted, Plan):
        raise TypeError(
            f"{who} must return an hdet.controllers.Plan, got {wanted!r}; write hdet.controllers.Plan(interval=10)"
        )
    if wanted.interval is not None:
        check_count(f"interval of {who}", wanted.interval)
    for name, value in (("outer_step", wanted.outer_step), ("tail_average", wanted.tail_average)):
        check_number(f"{name} of {who}", value, _A_PART)
    for name, words in (("until", "steps"), ("why", "words")):
        if not isinstance(getattr(wanted, name), Mapping):
            raise TypeError(f"{name} of {who} must be a dict of {words} by name, got {getattr(wanted, name)!r}")
    for name, step in wanted.until.items():
        check_count(f"until of {who} for {name}", step, least=0)
    return wanted


def check_returned(controller: Controller, method: str, state: Any, like: State, more: bool = False) -> State:
    """Check the return value of a controller's `init` or `update` and convert it to floats.

    It must have the names and entries of `like`; with `more`, further entries are allowed.

    Raises:
        TypeError, ValueError: if it does not; the message shows the value.
    """
    who = f"{type(controller).__name__}.{method}"
    if not isinstance(state, dict) or set(state) != set(like):
        raise ValueError(
            f"{who} must return a dict with an entry for each of {_names(like)}, got {_names(state)}; write "
            'return {name: {**entry, "scale": ...} for name, entry in state.items()}'
        )
    return {name: _checked_entry(who, name, state[name], like[name], more) for name in like}


def _checked_entry(who: str, name: str, entry: Any, like: Mapping[str, float], more: bool) -> dict[str, float]:
    needed = set(like)
    if not isinstance(entry, dict) or not needed <= set(entry) or (set(entry) != needed and not more):
        rule = "at least" if more else "the entries of init,"
        raise ValueError(f"{who} must return for {name} a dict with {rule} {sorted(needed)}, got {_names(entry)}")
    for key, value in entry.items():
        if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
            raise TypeError(f"{who} must return numbers, but {key} of {name} is {value!r}; write float(...)")
    return {key: float(value) for key, value in entry.items()}


def check_state(state: Any, like: State) -> State:
    """A loaded controller state as a fresh copy, checked against `like`, an initial one."""
    if not isinstance(state, dict) or set(state) != set(like):
        raise ValueError(
            f"the saved controller state is for the hyperparameters {_names(state)}, this ensemble explores "
            f"{_names(like)}; explore the same ones to resume"
        )
    state = {name: _with_added(state[name], entry) for name, entry in like.items()}
    for name, entry in like.items():
        if not isinstance(state[name], dict) or set(state[name]) != set(entry):
            raise ValueError(
                f"the saved state of {name} holds {_names(state[name])}, this controller needs {_names(entry)}; "
                "resume with the controller, and the version of hdet, that wrote it"
            )
    return {name: {key: float(state[name][key]) for key in entry} for name, entry in like.items()}


def _with_added(entry: Any, like: Mapping[str, float]) -> Any:
    """Complete a saved entry with the keys that older states lack."""
    if not isinstance(entry, dict):
        return entry
    whole = {**{key: like[key] for key in _ADDED if key in like}, **entry}
    return whole if set(whole) == set(like) else entry


def _names(state: Any) -> list[str]:
    return sorted(map(str, state)) if isinstance(state, dict) else [repr(state)]
