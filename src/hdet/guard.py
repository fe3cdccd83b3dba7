"""What is refused before training starts, with the line to write instead, and what must agree at converge."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn, optim
from torch.optim import Optimizer

from hdet.hyperparameter import Hyperparameter
from hdet.replicas import Replicas


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raise unless `value` is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, a number of optimizer steps, got {value!r}; write for example 100")
    if value < least:
        raise ValueError(f"{name} must be at least {least} optimizer steps, got {value}")


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


def check_number(name: str, value: object, holds: Callable[[float], bool], rule: str, example: str) -> None:
    """Raise unless `value` is a real number for which `holds`, which `rule` says in words, is true."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number and {rule}, got {value!r}; write for example {example}")
    if not holds(value):
        raise ValueError(f"{name} must {rule}, got {value}; write for example {example}")


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
    """What the replicas compare before they average: where they are, what they average, options and schedules."""
    explored = [(h.name, h.spread, h.ladder) for h in hyperparameters]
    same_schedule = "a scheduler must see the same numbers everywhere: all-reduce the metric that it is given"
    made = [
        Claim("the step", "every replica must take the same number of optimizer steps", step),
        Claim("the tensors to average", "build the same model and optimizer", layout),
        Claim("the ensemble's options", "give every replica the same arguments", checksum([*options, *explored])),
    ]
    for h in hyperparameters:
        bases = [float(base) for base in h.bases()]
        made.append(Claim(f"the base of {h.name}", same_schedule, bases[0]))
        made.append(Claim(f"the sum of the bases of {h.name}", same_schedule, math.fsum(bases)))
    return made


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
        odd = [r for r, value in enumerate(values) if not _same(value, values[0])]
        if odd:
            raise RuntimeError(
                f"the replicas disagree on {claim.name}: {values[0]} on replica 0, {values[odd[0]]} on replica "
                f"{odd[0]}; {claim.remedy}"
            )


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-12) or (math.isnan(a) and math.isnan(b))
