"""What an ensemble saves, and how it goes on from it."""

from __future__ import annotations

from typing import Any

from hdet.agreement.round_end import check_same_replica
from hdet.engine import Engine
from hdet.score import early_of

_VERSION = 2


def saved_state(engine: Engine) -> dict[str, Any]:
    """What cannot be recomputed."""
    engine.fan_out.restore()
    at = engine.rounds.at
    state: dict[str, Any] = {
        "version": _VERSION,
        "progress": engine.rounds.state_dict(),
        "controller": engine.steering.state_dict(),
    }
    if engine.replicas_differ:
        replicas = engine.rounds.replicas
        state["mid_round"] = {"replica": replicas.rank, "replicas": replicas.size}
    if at.step_in_round > 0:
        state["judge"] = engine.judge.state_dict()
    state["bases"] = engine.values.state_dict()
    alarm = engine.recovery.state_dict()
    if alarm is not None:
        state["alarm"] = alarm
    state["descent"] = engine.descent.state_dict()
    begun = engine.opened and at.step_in_round > 0
    return state | engine.outer.state_dict(begun=begun) | engine.tail.state_dict(engine.tensors.which())


def load_state(engine: Engine, state: dict[str, Any]) -> None:
    """Go on from `saved_state()`."""
    if not isinstance(state, dict) or state.get("version") != _VERSION:
        raise ValueError("state_dict must come from Ensemble.state_dict() of this version of hdet")
    settings, tensors, rounds = engine.settings, engine.tensors, engine.rounds
    mid_round = state.get("mid_round")
    if mid_round is not None and (settings.diverges or state["progress"].get("noisy")):
        check_same_replica(mid_round, rounds.replicas)
    engine.values.check_state(state["bases"])
    engine.tail.check_state(state, tensors.stepped(), tensors.which())
    engine.steering.load_state_dict(state["controller"])
    engine.forget_noise()
    engine.judge.reset()
    if "judge" in state:
        engine.judge.load_state_dict(state["judge"])
    rounds.load_state_dict(state["progress"])
    if rounds.at.noisy and settings.model is not None:  # which of its parameters are is not saved
        tensors.set_noisy(list(settings.model.parameters()))
    engine.outer.load_state_dict(state, tensors.parameters())
    engine.tail.load_state_dict(state, tensors.stepped())
    engine.values.load_state_dict(state["bases"])
    engine.recovery.load_state_dict(state.get("alarm"))
    engine.descent.load_state_dict(state.get("descent"))
    engine.resume()
    engine.resumed = rounds.at.step > 0


def start_from(engine: Engine, step: int) -> None:
    """Go on at `step` without a saved state."""
    engine.forget_noise()
    engine.judge.reset()
    engine.descent.reset()
    engine.outer.reset()
    engine.tail.reset()
    engine.rounds.start_from(step)
    engine.steering.reset()
    engine.resume()


def averaged_state(state: dict[str, Any]) -> dict[str, Any]:
    """A state of mid-round for replicas whose weights were averaged. Of its losses only the first ones are kept."""
    progress = state["progress"]
    kept = {key: value for key, value in state.items() if key not in ("mid_round", "judge")}
    if "judge" in state:
        kept["judge"] = {**early_of(state["judge"]), "start": None}
    return {**kept, "progress": {**progress, "cut": progress["step_in_round"] > 0, "noisy": False}}
