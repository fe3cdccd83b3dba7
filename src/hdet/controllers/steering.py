"""A controller together with its state: what an ensemble holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hdet.controllers.evidence import words
from hdet.controllers.report import Controller, Report, State, check_state

_SHOWN = ("estimate", "error")


class Confidence(NamedTuple):
    """What a controller knows of a hyperparameter; see `hdet.HyperparameterRecord`."""

    memory: dict[str, float]
    estimate: float | None
    error: float | None
    finding: str


class Steering:
    """The scales, as a controller moves them; with `act=False` it is asked, and nothing moves."""

    def __init__(self, controller: Controller, names: Sequence[str], act: bool) -> None:
        self.controller = controller
        self.act = act
        self._names = list(names)
        self._state: State = controller.init(self._names)

    @property
    def scales(self) -> dict[str, float]:
        """The factor on each hyperparameter's schedule, by name."""
        return {name: entry["scale"] for name, entry in self._state.items()}

    def update(self, report: Report) -> dict[str, float]:
        """Take in one full round; the scales that the controller asks for."""
        proposed = self.controller.update(self._state, report)
        for name, entry in proposed.items():
            low, high = report.observations[name].limits
            if not low <= entry["scale"] <= high:
                proposed = {**proposed, name: {**entry, "scale": min(max(entry["scale"], low), high)}}
        before = self.scales
        self._state = {
            name: dict(entry) if self.act else {**entry, "scale": before[name]} for name, entry in proposed.items()
        }
        return {name: entry["scale"] for name, entry in proposed.items()}

    def confidence(self, name: str, scale: float) -> Confidence:
        """What the controller knows of a hyperparameter that was trained with at `scale`, and how well."""
        memory = {key: value for key, value in self._state[name].items() if key not in ("scale", *_SHOWN)}
        if not all(key in self._state[name] for key in _SHOWN):
            return Confidence(memory, None, None, "")
        estimate, error = (self._state[name][key] for key in _SHOWN)
        return Confidence(memory, estimate, error, words(name, scale, estimate, error))

    def state_dict(self) -> State:
        """The controller's state: numbers by name."""
        return {name: dict(entry) for name, entry in self._state.items()}

    def load_state_dict(self, state: Any) -> None:
        """Go on from `state_dict()`; raises if it was saved for something else."""
        self._state = check_state(state, self.controller.init(self._names))

    def scale_by(self, factor: float, names: Sequence[str], forget: bool = False) -> None:
        """Multiply some scales; with `forget` the controller remembers nothing else."""
        fresh = self.controller.init(self._names)
        for name, entry in self._state.items():
            scale = entry["scale"] * (factor if name in names else 1.0)
            self._state[name] = {**(fresh[name] if forget else entry), "scale": scale}

    def reset(self) -> None:
        """Begin anew: every scale is 1."""
        self._state = self.controller.init(self._names)
