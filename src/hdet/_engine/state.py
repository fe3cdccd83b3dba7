"""Saves and restores an ensemble. Each part knows its own state; this module only collects and distributes it."""

from __future__ import annotations

from typing import Any

from hdet._engine.engine import Engine
from hdet._replicas.claims import check_same_replica

FORMAT = 3


def saved_state(engine: Engine) -> dict[str, Any]:
    """The state that cannot be recomputed.

    "phases" is the same on all replicas at a round's end, "weights" even in mid-round; "own" is this replica's.
    """
    run, phases = engine.run, engine.phases
    run.values.fan_out.restore()
    state: dict[str, Any] = {"version": FORMAT, "progress": run.rounds.state_dict(), "bases": run.values.state_dict()}
    if run.replicas_differ:
        state["mid_round"] = {"replica": run.replicas.rank, "replicas": run.replicas.size}
    return state | {
        "phases": {p.name: found for p in phases if not p.holds_weights and (found := p.state_dict())},
        "weights": {p.name: found for p in phases if p.holds_weights and (found := p.state_dict())},
        "own": {p.name: found for p in phases if (found := p.own_state_dict())},
    }


def load_state(engine: Engine, state: dict[str, Any]) -> None:
    """Resume from `saved_state()`."""
    _check_format(state)
    run = engine.run
    mid_round = state.get("mid_round")
    if mid_round is not None and (run.settings.diverges or state["progress"].get("noisy")):
        check_same_replica(mid_round, run.replicas)
    saved, own = {**state["phases"], **state["weights"]}, state["own"]
    run.values.check_state(state["bases"])
    for phase in engine.phases:
        phase.check_state(saved.get(phase.name, {}))
    run.forget_noise()
    run.rounds.load_state_dict(state["progress"])
    if run.at.noisy and run.settings.model is not None:  # which of its parameters are is not saved
        run.tensors.set_noisy(list(run.settings.model.parameters()))
    for phase in engine.phases:
        phase.load_state_dict(saved.get(phase.name, {}), own.get(phase.name, {}))
    run.values.load_state_dict(state["bases"])
    engine.resume()
    run.note_resume()


def start_from(engine: Engine, step: int) -> None:
    """Start at `step` without a saved state."""
    engine.run.forget_noise()
    engine.run.rounds.start_from(step)
    for phase in engine.phases:
        phase.reset()
    engine.resume()


def averaged_state(state: dict[str, Any]) -> dict[str, Any]:
    """A state of mid-round for replicas whose weights were averaged: their losses so far do not count."""
    progress = state["progress"]
    cut = {**progress, "cut": progress["step_in_round"] > 0, "noisy": False}
    return {**{key: value for key, value in state.items() if key != "mid_round"}, "progress": cut, "own": {}}


def _check_format(state: Any) -> None:
    found = state.get("version") if isinstance(state, dict) else None
    if found == FORMAT:
        return
    if isinstance(found, int) and found < FORMAT:
        raise ValueError(
            f"this state was saved by an older hdet, in format {found}, and this one reads format {FORMAT}: resume "
            "with the version that saved it, or load the weights alone and call ensemble.start_from(step)"
        )
    raise ValueError("state_dict must come from Ensemble.state_dict() of this version of hdet")
