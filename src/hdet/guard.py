"""What is refused before training starts, with the line to write instead, and what must agree at converge."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn, optim
from torch.optim import Optimizer

from hdet.arguments import check_count
from hdet.controllers import Controller, Fixed, Softmax
from hdet.hyperparameter import Hyperparameter
from hdet.replicas import Replicas


def check_interval(interval: int | Literal["auto"], total_steps: int | None, explores: bool) -> int:
    """The interval in steps, "auto" resolved; warn if it is longer than a run that explores anything."""
    if total_steps is not None:
        check_count("total_steps", total_steps)
    if interval == "auto":
        if total_steps is None:
            raise ValueError('interval="auto" needs total_steps; give total_steps, or an interval in steps')
        return min(max(total_steps // 200, 1), 1000)
    check_count("interval", interval)
    if explores and total_steps is not None and interval > total_steps:
        warnings.warn(
            f"interval {interval} is longer than the run of {total_steps} steps: the replicas are averaged once, "
            "at the end, and no controller acts; use a shorter interval",
            stacklevel=3,
        )
    return interval


def check_controller(controller: object) -> None:
    """Raise unless `controller` is an object with `init` and `update`."""
    if isinstance(controller, type) or not all(hasattr(controller, name) for name in ("init", "update", "needs_score")):
        raise TypeError(
            f"controller must be an object with needs_score, init() and update(), got {controller!r}; "
            "write for example controller=hdet.Softmax()"
        )


def check_followers(also: Sequence[object], on_round: Sequence[object]) -> None:
    """Raise unless `also` holds modules and tensors, and `on_round` callables."""
    for follower in also:
        if not isinstance(follower, (nn.Module, Tensor)):
            raise TypeError(f"also must hold modules or tensors, got {follower!r}; write for example also=[ema]")
    for call in on_round:
        if not callable(call):
            raise TypeError(f"on_round must hold callables, got {call!r}; write for example on_round=[print]")


def warn_without_effect(
    controller: Controller, act: bool, explores: bool, interval: int, total_steps: int | None
) -> None:
    """Warn of arguments that change nothing, with what to do."""
    name = type(controller).__name__
    problem = None
    if controller.needs_score and not explores:
        problem = f"{name} has no effect, as nothing is explored: give a hyperparameter a spread"
    elif not act and isinstance(controller, Fixed):
        problem = "act=False has no effect without a controller that moves something: pass one, or leave act out"
    elif isinstance(controller, Softmax) and total_steps is not None:
        last = last_acting_step(interval, total_steps)
        if last == 0 or controller.warmup_steps > last:
            problem = (
                f"{name} never acts: the last round that it could act on ends at step {last}, before its "
                f"{controller.warmup_steps} warm-up steps are over; use a shorter warm-up or interval"
            )
    if problem is not None:
        warnings.warn(problem, stacklevel=4)


def last_acting_step(interval: int, total_steps: int) -> int:
    """The end of the last full round that is followed by another step: 0 if there is none."""
    return (total_steps - 1) // interval * interval


def check_hyperparameters(hyperparameters: Sequence[Hyperparameter], optimizers: Sequence[Optimizer]) -> None:
    """Raise if two hyperparameters are the same scalar or share a name, or one is not the optimizers'."""
    taken: dict[tuple[int, int, str], str] = {}
    names: set[str] = set()
    for h in hyperparameters:
        if not isinstance(h, Hyperparameter):
            raise TypeError(
                f"hyperparameters must hold Hyperparameter objects, got {type(h).__name__}; "
                "write for example [hdet.learning_rate(optimizer, spread=0.1)]"
            )
        if h.name in names:
            raise ValueError(f"two hyperparameters are named {h.name!r}; names must differ")
        names.add(h.name)
        for optimizer in h.optimizers:
            if not any(optimizer is known for known in optimizers):
                raise ValueError(
                    f"{h.name} belongs to an optimizer that this ensemble does not know; "
                    "pass every optimizer: Ensemble([muon, adamw], ...)"
                )
            first = h.group or 0
            for number, group in enumerate(h.groups(optimizer), start=first):
                if h.key not in group:
                    raise ValueError(f"{type(optimizer).__name__} has no {h.key!r} in parameter group {number}")
                other = taken.setdefault((id(optimizer), number, h.key), h.name)
                if other != h.name:
                    raise ValueError(
                        f"{h.name} and {other} both explore {h.key!r} of parameter group {number}; keep one"
                    )


def check_model(model: object, optimizers: Sequence[Optimizer]) -> None:
    """Raise unless `model` is None or a module that holds some of the optimizers' parameters."""
    if model is None:
        return
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}; pass the module you train")
    trained = {id(p) for optimizer in optimizers for g in optimizer.param_groups for p in g["params"]}
    if not any(id(p) in trained for p in model.parameters()):
        raise ValueError(
            f"model must be the one that the optimizer trains, got a {type(model).__name__} that shares no "
            "parameter with it; pass the module whose parameters() went into the optimizer"
        )


def check_can_diverge(optimizers: Sequence[Optimizer], model: nn.Module | None) -> None:
    """Raise where replicas cannot hold different weights, or must not take different steps."""
    for optimizer in optimizers:
        if isinstance(optimizer, optim.LBFGS):
            raise ValueError(
                "LBFGS cannot be used with a spread: its line search branches on each replica's own loss, so "
                "replicas would run backward a different number of times and hang; use spread 0 or another optimizer"
            )
        if _is_a("ZeroRedundancyOptimizer", optimizer):
            raise ValueError(
                "ZeroRedundancyOptimizer cannot be used with a spread: one rank steps each parameter for all, "
                "so replicas cannot diverge; use the plain optimizer, or spread 0"
            )
        for group in optimizer.param_groups:
            for p in group["params"]:
                _check_not_sharded(p)
    for module in model.modules() if model is not None else ():
        if _is_a("FullyShardedDataParallel", module):
            raise ValueError(_SHARDED.format("FullyShardedDataParallel shards the"))


_SHARDED = (
    "{} parameters over the ranks: there is one model, so replicas cannot diverge; wrap the model in "
    "DistributedDataParallel instead, or use spread 0"
)


def _check_not_sharded(p: Tensor) -> None:
    if _is_a("DTensor", p):
        raise ValueError(_SHARDED.format("the optimizer holds DTensors, which spread the"))
    if getattr(p, "_fsdp_flattened", False) or _is_a("FlatParameter", p):
        raise ValueError(_SHARDED.format("FullyShardedDataParallel shards the"))


def _is_a(class_name: str, thing: object) -> bool:
    return any(c.__name__ == class_name for c in type(thing).__mro__)


def check_same_replica(saved: dict[str, Any], replicas: Replicas) -> None:
    """Raise unless a state that was `saved` in mid-round is this replica's own."""
    if (saved["replica"], saved["replicas"]) != (replicas.rank, replicas.size):
        raise ValueError(
            f"this state was saved in mid-round by replica {saved['replica']} of {saved['replicas']} and belongs to "
            f"it; this is replica {replicas.rank} of {replicas.size}. Load each replica's own file on the same number "
            "of replicas, or save at a round's end (after ensemble.converge()), which loads anywhere"
        )


@dataclass(frozen=True)
class Claim:
    """Something that must be the same on every replica: what it is, what to do if not, and its value here."""

    name: str
    remedy: str
    value: float


def claims(step: int, layout: int, options: Sequence[object], hyperparameters: Sequence[Hyperparameter]) -> list[Claim]:
    """What the replicas compare before they average. Always as many, whatever the replica was given."""
    explored = [(h.name, h.spread, h.ladder, len(list(h.bases()))) for h in hyperparameters]
    total = math.fsum(claim.value for claim in base_claims(hyperparameters))
    return [
        Claim("the step", "every replica must take the same number of optimizer steps", step),
        Claim("the tensors to average", "build the same model and optimizer", layout),
        Claim("the ensemble's options", "give every replica the same arguments", checksum([*options, *explored])),
        Claim("the sum of all bases", _SAME_SCHEDULE, total),
    ]


def base_claims(hyperparameters: Sequence[Hyperparameter]) -> list[Claim]:
    """The bases one by one, to find the one that differs when their sum does."""
    return [Claim(f"the base of {h.name}", _SAME_SCHEDULE, float(base)) for h in hyperparameters for base in h.bases()]


_SAME_SCHEDULE = "a scheduler must see the same numbers everywhere: all-reduce the metric that it is given"


def checksum(values: Sequence[object]) -> int:
    """A number that tells lists of plain values apart."""
    return zlib.crc32(repr(values).encode())


def check_agreement(table: Sequence[Sequence[float]], claims: Sequence[Claim]) -> None:
    """Raise, with the same message on every replica, if the replicas make different claims.

    Args:
        table: one row per replica, beginning with the values of its claims.
        claims: this replica's.
    """
    for index, claim in enumerate(claims):
        values = [row[index] for row in table]
        odd = [r for r, value in enumerate(values) if not same(value, values[0])]
        if odd:
            raise RuntimeError(
                f"the replicas disagree on {claim.name}: {values[0]} on replica 0, {values[odd[0]]} on replica "
                f"{odd[0]}; {claim.remedy}"
            )


def same(a: float, b: float) -> bool:
    """Whether two replicas' numbers are the same, up to the last digits of another machine's arithmetic."""
    return math.isclose(a, b, rel_tol=1e-12) or (math.isnan(a) and math.isnan(b))
