"""What was saved of an ensemble, alone or within a scheduler: what is one replica's in it, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hdet.ensemble import Ensemble

State = dict[str, Any]
# Where a round began, the momenta of the outer step, and the tail average.
_COMMON = ("outer_step", "outer_momentum", "tail")


def losses_of(ensemble: Ensemble) -> State | None:
    """The losses of the round so far, which are this replica's own even where all hold the same weights."""
    return ensemble.state_dict().get("judge")


def with_losses(entry: State, losses: State) -> State:
    """A saved entry with a replica's own losses."""
    return _changed(entry, lambda state: {**state, "judge": losses})


def without_replica(entry: State) -> State:
    """A saved entry that any replica can go on from."""
    return _changed(entry, Ensemble.averaged_state)


def without_common(entry: State) -> tuple[State, State]:
    """A replica's saved entry without what is the same on all of them even in mid-round, and that."""
    common = {key: value for key, value in _inner(entry).items() if key in _COMMON and value}
    return _changed(entry, lambda state: {key: state[key] for key in state if key not in common}), common


def with_common(entry: State, common: State) -> State:
    """Back from `without_common()`."""
    return _changed(entry, lambda state: {**state, **common})


def _inner(entry: State) -> State:
    state: State = entry["state"]
    inner: State | None = state.get("ensemble")  # a scheduler's
    return state if inner is None else inner


def _changed(entry: State, change: Callable[[State], State]) -> State:
    changed = change(_inner(entry))
    return {
        **entry,
        "state": {**entry["state"], "ensemble": changed} if _inner(entry) is not entry["state"] else changed,
    }
