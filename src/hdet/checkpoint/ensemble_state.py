"""What was saved of an ensemble, alone or within a scheduler: what is one replica's in it, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hdet.ensemble import Ensemble

State = dict[str, Any]


def losses_of(ensemble: Ensemble) -> State:
    """The losses of the round so far, which are this replica's own even where all hold the same weights."""
    own: State = ensemble.state_dict()["own"]
    return own


def with_losses(entry: State, losses: State) -> State:
    """A saved entry with a replica's own losses."""
    return _changed(entry, lambda state: {**state, "own": losses})


def without_replica(entry: State) -> State:
    """A saved entry that any replica can go on from."""
    return _changed(entry, Ensemble.averaged_state)


def without_common(entry: State) -> tuple[State, State]:
    """A replica's saved entry without what is the same on all of them even in mid-round, and that."""
    return _changed(entry, lambda state: {**state, "weights": {}}), _inner(entry)["weights"]


def with_common(entry: State, common: State) -> State:
    """Back from `without_common()`."""
    return _changed(entry, lambda state: {**state, "weights": common})


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
