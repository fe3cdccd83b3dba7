"""What a controller sees and what it is: a plain state, `init` and `update`, nothing else.

A controller is pure. It runs in float64 on the host, is given the same report on every replica and so
returns the same state on every replica, without traffic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

State = dict[str, dict[str, float]]
"""By hyperparameter name: at least `scale`, and whatever else the controller remembers."""


@dataclass(frozen=True)
class Observation:
    """One hyperparameter in one round.

    Attributes:
        base: the schedule's value at the round's last step.
        next_base: the schedule's value at the next step.
        floor: the center does not fall below this, unless the base does.
        multipliers: by replica.
    """

    base: float
    next_base: float
    floor: float
    multipliers: tuple[float, ...]


@dataclass(frozen=True)
class Report:
    """One full round, the same on every replica.

    Attributes:
        step: optimizer steps taken since the start of the run.
        scores: the replicas' mean losses, by replica; not finite where a replica has none.
        observations: by hyperparameter name.
    """

    step: int
    scores: tuple[float, ...]
    observations: Mapping[str, Observation]


class Controller(Protocol):
    """Steers the scales of the explored hyperparameters; see `hdet.Softmax` for one to read."""

    @property
    def needs_score(self) -> bool:
        """Whether `step()` must be given a loss."""

    def init(self, names: Sequence[str]) -> State:
        """The state before the first round: every scale is 1."""

    def update(self, state: State, report: Report) -> State:
        """The state after one full round. `state` itself is left as it is."""


def check_state(state: Any, like: State) -> State:
    """A loaded controller state as a fresh copy, checked against `like`, an initial one."""
    if not isinstance(state, dict) or set(state) != set(like):
        raise ValueError(
            f"the saved controller state is for the hyperparameters {_names(state)}, this ensemble explores "
            f"{_names(like)}; explore the same ones to resume"
        )
    for name, entry in like.items():
        if not isinstance(state[name], dict) or set(state[name]) != set(entry):
            raise ValueError(
                f"the saved state of {name} holds {_names(state[name])}, this controller needs {_names(entry)}; "
                "resume with the controller that wrote it"
            )
    return {name: {key: float(value) for key, value in entry.items()} for name, entry in state.items()}


def _names(state: Any) -> list[str]:
    return sorted(map(str, state)) if isinstance(state, dict) else [repr(state)]
