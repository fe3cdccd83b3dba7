"""A controller together with its state, as an ensemble holds it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from hdet._options.safety import Limits
from hdet.controllers.confidence import words, words_unexplored
from hdet.controllers.report import Controller, Report, State, check_returned, check_state

_SHOWN = ("estimate", "error")


class Confidence(NamedTuple):
    """A controller's knowledge of a hyperparameter; see `hdet.records.HyperparameterRecord`."""

    memory: dict[str, float]
    estimate: float | None
    error: float | None
    finding: str


class Steering:
    """The scales and the controller that moves them; with `observe_only`, the controller runs but nothing moves."""

    def __init__(
        self, controller: Controller, names: Sequence[str], observe_only: bool = False, limits: Limits | None = None
    ) -> None:
        self.controller = controller
        self.limits = Limits() if limits is None else limits
        self.observe_only = observe_only
        self.said: tuple[str, ...] = ()  # events of the last update: requests that were refused
        self._names = list(names)
        self._state = self._init()

    @property
    def scales(self) -> dict[str, float]:
        """The factor on each hyperparameter's schedule, by name."""
        return {name: entry["scale"] for name, entry in self._state.items()}

    def update(self, report: Report) -> dict[str, float]:
        """Pass one full round to the controller and return the scales that it asks for.

        Raises:
            TypeError, ValueError: if the controller does not return a state.
        """
        before, fresh = self.scales, self._init()
        proposed, said = {}, []
        told = check_returned(self.controller, "update", self.controller.update(self._state, report), fresh)
        for name, entry in told.items():
            scale = entry["scale"]
            if not (math.isfinite(scale) and scale > 0):  # restart a controller that has gone astray
                said.append(
                    f"{name}: {type(self.controller).__name__} asked for a scale of {scale:g}; it begins anew at "
                    f"{before[name]:g}"
                )
                entry, scale = fresh[name], before[name]  # noqa: PLW2901
            scale = self.limits.bounded(scale, before[name])
            proposed[name] = {**entry, "scale": report.observations[name].within_limits(scale, before[name])}
        self.said = tuple(said)
        self._state = {
            name: {**entry, "scale": before[name]} if self.observe_only else dict(entry)
            for name, entry in proposed.items()
        }
        return {name: entry["scale"] for name, entry in proposed.items()}

    def confidence(self, name: str, scale: float, explored: bool = True) -> Confidence:
        """The controller's estimate for a hyperparameter trained with `scale`; empty if it is never `explored`."""
        memory = {key: value for key, value in self._state[name].items() if key not in ("scale", *_SHOWN)}
        if not all(key in self._state[name] for key in _SHOWN):
            return Confidence(memory, None, None, "")
        estimate, error = (self._state[name][key] for key in _SHOWN)
        told = words(name, scale, estimate, error) if explored else words_unexplored(name, scale)
        return Confidence(memory, estimate, error, told)

    def state_dict(self) -> State:
        """The controller's state: numbers by name."""
        return {name: dict(entry) for name, entry in self._state.items()}

    def load_state_dict(self, state: Any) -> None:
        """Resume from `state_dict()`; raises if it does not fit this controller."""
        self._state = check_state(state, self._init())

    @property
    def numbers(self) -> list[float]:
        """The controller's state as a flat list, for another replica with the same controller."""
        return [value for entry in self._state.values() for value in entry.values()]

    def take_over(self, numbers: Sequence[float]) -> None:
        """Replace the controller's state by another replica's `numbers`."""
        row = iter(numbers)
        self._state = {name: {key: next(row) for key in entry} for name, entry in self._state.items()}

    def scale_by(self, factor: float, names: Sequence[str], forget: bool = False) -> None:
        """Multiply some scales; with `forget`, reset the rest of the controller's memory."""
        fresh = self._init()
        for name, entry in self._state.items():
            scale = entry["scale"] * (factor if name in names else 1.0)
            self._state[name] = {**(fresh[name] if forget else entry), "scale": scale}

    def reset(self) -> None:
        """Start over: every scale is 1."""
        self._state = self._init()

    def _init(self) -> State:
        like: State = {name: {"scale": 1.0} for name in self._names}
        state = check_returned(self.controller, "init", self.controller.init(self._names), like, more=True)
        for name, entry in state.items():
            if not 0 < entry["scale"] < math.inf:
                raise ValueError(
                    f"{type(self.controller).__name__}.init must return positive and finite scales, got "
                    f'{entry["scale"]} for {name}; write {{"scale": 1.0}}'
                )
        return state
