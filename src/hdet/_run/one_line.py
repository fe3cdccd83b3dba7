"""`repr` of an ensemble. Reads nothing from a device and asks no other replica."""

from __future__ import annotations

from torch import Tensor

from hdet._explore.hyperparameter import Hyperparameter
from hdet._run.rounds import Stage
from hdet._run.run import Run

_MOST = 3  # hyperparameters listed one by one


def one_line(run: Run) -> str:
    """Replica, step, values as center x multiplier, interval, controller, and anything unusual."""
    at, given, replicas = run.at, run.settings, run.replicas
    of = "" if given.total_steps is None else f" of {given.total_steps}"
    names = [h.name for h in given.hyperparameters]
    told = [_trains_with(h, run) for h in given.hyperparameters[:_MOST]]
    more = [f"{len(names) - _MOST} more"] if len(names) > _MOST else []
    about = [f"interval {given.interval}", type(given.controller).__name__]
    state = [
        *(["local gradients"] if given.local else []),
        *(["only observes"] if given.observe_only else []),
        *(["holds the consensus"] if at.stage is Stage.CONSENSUS else []),
        *(["closed"] if at.closed else ["finished"] if at.finished else []),
    ]
    where = [f"replica {replicas.rank} of {replicas.size}", f"step {at.step}{of}"]
    return ", ".join([*where, *told, *more, *about, *state])


def _trains_with(h: Hyperparameter, run: Run) -> str:
    """The name, the center in the first place, and this replica's multiplier unless it is 1."""
    scale = run.scales[h.name]
    multiplier = 1.0 if run.at.closed else run.rounds.multipliers[h.name]
    bases = run.values.used(h) if run.values.fan_out.applied else list(h.bases())
    factor = "" if multiplier == 1 else f" x {multiplier:.3g}"
    if not bases or (isinstance(bases[0], Tensor) and bases[0].device.type != "cpu"):  # not to wait for a device
        return f"{h.name} schedule{'' if scale == 1 else f' x {scale:.3g}'}{factor}"
    return f"{h.name} {h.center(float(bases[0]), scale):.3g}{factor}"
