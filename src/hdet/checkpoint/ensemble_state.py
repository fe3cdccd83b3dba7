"""What was saved of an ensemble, alone or within a scheduler: what is one replica's in it, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hdet.ensemble import Ensemble

State = dict[str, Any]


def losses_of(ensemble: Ensemble) -> State | None:
    """The losses of the round so far, which are this replica's own even where all hold the same weights."""
    return ensemble.state_dict().get("judge")


def with_losses(entry: State, losses: State) -> State:
    """A saved entry with a replica's own losses."""
    return _changed(entry, lambda state: {**state, "judge": losses})


def without_replica(entry: State) -> State:
    """A saved entry that any replica can go on from."""
    return _changed(entry, Ensemble.averaged_state)


def _changed(entry: State, change: Callable[[State], State]) -> State:
    state = entry["state"]
    inner = state.get("ensemble")  # a scheduler's
    return {**entry, "state": change(state) if inner is None else {**state, "ensemble": change(inner)}}
