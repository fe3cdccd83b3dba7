"""Splits the saved state of an ensemble, alone or within a scheduler, into one replica's part and the common part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hdet.ensemble import Ensemble

State = dict[str, Any]


def losses_of(ensemble: Ensemble) -> State:
    """This replica's losses of the current round; replicas differ in these even if their weights are equal."""
    own: State = ensemble.state_dict()["own"]
    return own


def with_losses(entry: State, losses: State) -> State:
    """A saved entry with a replica's own losses."""
    return _changed(entry, lambda state: {**state, "own": losses})


def without_replica(entry: State) -> State:
    """A saved entry that any replica can resume from."""
    return _changed(entry, Ensemble.averaged_state)


def without_common(entry: State) -> tuple[State, State]:
    """Split a replica's saved entry into its own part and the part that is equal on all even in mid-round."""
    return _changed(entry, lambda state: {**state, "weights": {}}), _inner(entry)["weights"]


def with_common(entry: State, common: State) -> State:
    """Undo `without_common()`."""
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
