"""The one gather at the end of a round: all phases send, then all receive."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hdet._phases.phase import Call, Phase, Round
from hdet._replicas import LostReplicaError
from hdet._run.run import Run
from hdet._tensors import converge

_NO_MORE_DATA = "the end of its data"


def ending(run: Run, call: Call, full: bool, last: bool = False) -> Round:
    """The `Round` for the current round, which ends now.

    Args:
        run: the run.
        call: the call that ends it.
        full: whether it has all its steps.
        last: end the run with it, whatever steps are left.
    """
    at = run.at
    ends_early = last and not run.rounds.over
    differ = not run.equal if ends_early else run.rounds.diverges
    return Round(
        call=call,
        number=at.round,
        step=at.step,
        steps=at.step_in_round,
        full=full,
        last=last or run.rounds.over,
        compares=differ or (run.settings.safety.rollback is not None and not ends_early),
        explores=run.rounds.explores,
        device=run.tensors.device or run.replicas.device,
        replicas=run.replicas.size,
        began=time.perf_counter(),
    )


def compare(run: Run, phases: Sequence[Phase], rnd: Round) -> None:
    """Gather the numbers of all phases from all replicas. Collective."""
    for phase in phases:
        phase.tell(rnd)
    place = f"the end of round {rnd.number}" if rnd.call == "the end of a round" else rnd.call
    where = _NO_MORE_DATA if rnd.gone else place
    run.replicas.arrive(f"{where} (step {rnd.step})", "" if rnd.gone else rnd.call)
    try:
        rnd.gather(run.replicas.gather)
        for phase in phases:
            phase.hear(rnd)
    except LostReplicaError as error:
        raise error.and_then(converge.UNTOUCHED) from error
