"""What an ensemble was given: checked, completed, and told to the other replicas."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from hdet._explore.hyperparameter import Hyperparameter, flatten
from hdet._explore.in_groups import InGroups, learning_rate
from hdet._explore.slots import Design
from hdet._hooks import unwrap
from hdet._phases import tail_of as tail
from hdet._phases.outer_step_of import Nesterov, OuterStep
from hdet._phases.rollback.alarm import Rollback
from hdet._probe.judge import AnyProbe
from hdet._probe.probe import Probe
from hdet._replicas import Where, find_replicas
from hdet._replicas.fingerprint import Claims, fingerprint, plain
from hdet._run import checks, no_effect
from hdet._tensors.deepspeed import check_deepspeed
from hdet._tensors.local_gradients import Gradients
from hdet._tensors.shards import check_shards, reshard
from hdet.controllers import Auto, Controller, Fixed, Limits, Plan, plan


@dataclass(frozen=True, eq=False, repr=False)
class Settings:
    """The arguments of an ensemble that hold for its whole life; `hdet.Ensemble` says what they mean.

    Attributes:
        hyperparameters: all of them, the learning rate that a rollback cuts included.
        explored: those that replicas get different values of.
        plan: what the controller wants for this run.
        local: whether gradients are local.
    """

    optimizers: tuple[Optimizer, ...]
    hyperparameters: tuple[Hyperparameter, ...]
    explored: tuple[Hyperparameter, ...]
    controller: Controller
    plan: Plan
    probe: AnyProbe | None
    model: nn.Module | None
    total_steps: int | None
    interval: int
    design: Design
    local: bool
    outer_step: float | Nesterov
    tail_average: float
    average_state: bool
    rollback: Rollback | None
    guarded: bool
    limits: Limits
    atomic: bool
    act: bool
    where: Where | None
    seed: int

    @property
    def group_or_mesh(self) -> dict[str, Any]:
        """Where the replicas are, as arguments."""
        return {"mesh" if isinstance(self.where, DeviceMesh) else "process_group": self.where}

    @property
    def diverges(self) -> bool:
        """Whether replicas are to hold different weights within a round."""
        return bool(self.explored) or self.local

    @property
    def rates(self) -> list[str]:
        """The hyperparameters that are learning rates, by name."""
        return [h.name for h in self.hyperparameters if _is_rate(h)]

    def options(self) -> dict[str, object]:
        """What was given beside the hyperparameters, as told to the others."""
        return {
            "seed": self.seed, "interval": self.interval, "total_steps": self.total_steps, "act": self.act,
            "controller": plain(self.controller), "gradients": "local" if self.local else "shared",
            "outer_step": plain(self.outer_step), "tail_average": self.tail_average,
            "average_state": self.average_state, "design": self.design, "probe": self.probe is not None,
            "rollback": plain(self.rollback), "guard": self.guarded, "limits": plain(self.limits),
            "atomic": self.atomic,
        }  # fmt: skip

    def claims(self, replicas: int, start_step: int, followers: Iterable[Tensor]) -> Claims:
        """What must be the same on all replicas before the first step."""
        options = {**self.options(), "replicas": replicas, "start_step": start_step, "probe": _kind(self.probe)}
        return fingerprint(
            options, self.optimizers, self.model, self.hyperparameters, followers, compare_tensors=self.diverges
        )


def read_settings(
    optimizer: Optimizer | Sequence[Optimizer],
    hyperparameters: Sequence[Hyperparameter | Sequence[Hyperparameter]] | None,
    *,
    total_steps: int | None,
    interval: int | Literal["auto"],
    controller: Controller | None,
    probe: AnyProbe | None,
    gradients: Gradients,
    outer_step: float | Nesterov | None,
    tail_average: float | None,
    average_state: bool,
    design: Design | None,
    rollback: Rollback | None,
    guard: bool,
    limits: Limits | None,
    atomic: bool,
    act: bool,
    model: nn.Module | None,
    process_group: dist.ProcessGroup | None,
    mesh: DeviceMesh | None,
    seed: int,
) -> Settings:
    """The arguments of an ensemble, checked and completed.

    Raises:
        TypeError, ValueError: for what cannot work, with what to write instead.
    """
    check_deepspeed(optimizer, model, gradients)
    if isinstance(model, nn.Module):
        reshard(model)  # while whole weights are gathered its parameters are others
    optimizers = tuple(unwrap(o) for o in (optimizer if isinstance(optimizer, Sequence) else (optimizer,)))
    explorable = flatten([learning_rate(optimizers)] if hyperparameters is None else hyperparameters)
    checks.check_hyperparameters(explorable, optimizers)
    where = checks.check_where(process_group, mesh)
    checks.check_average_state(average_state, gradients)
    if gradients == "shared":
        checks.check_wrapper(model if isinstance(model, nn.Module) else None, where)
    wants = _controller(controller, probe)
    explored = tuple(h for h in explorable if h.diverges)
    _check(wants, probe, gradients, model, act, guard, optimizers, explored)
    if explored or gradients == "local":
        checks.check_can_diverge(optimizers)
        check_shards(optimizers, model, where, gradients)
    told = plan(wants, [h.name for h in explorable], total_steps, _replicas(where))
    if rollback is not None and not any(map(_is_rate, explorable)):
        explorable.append(learning_rate(optimizers, spread=0.0))  # to be cut
    local = gradients == "local"
    wanted = told.tail_average if explored else 0.0  # with a spread of 0 it is plain training
    outer = OuterStep(told.outer_step if outer_step is None else outer_step)
    settings = Settings(
        optimizers=optimizers,
        hyperparameters=tuple(explorable),
        explored=explored,
        controller=wants,
        plan=replace(told, why={**told.why, **_tail_told(tail_average, wanted, probe, model)}),
        probe=probe,
        model=model,
        total_steps=total_steps,
        interval=checks.check_interval(interval, total_steps, bool(explored) or local, told.interval),
        design=checks.check_design(design or told.design),
        local=local,
        outer_step=outer.given,
        tail_average=_tail_average(tail_average, wanted, total_steps, probe, model),
        average_state=average_state,
        rollback=None if rollback is None else checks.check_rollback(rollback),
        guarded=bool(guard),
        limits=checks.check_limits(limits),
        atomic=bool(atomic),
        act=act,
        where=where,
        seed=seed,
    )
    if settings.tail_average:
        check_shards(optimizers, model, where, gradients)  # what is scored is shared out over the replicas
    searches = controller is not None and told.needs_line
    no_effect.warn_without_effect(wants, searches, act, bool(explored), settings.interval, total_steps)
    no_effect.warn_of_probe(wants, probe, told, local, settings.tail_average)
    no_effect.warn_of_bases(explored)
    no_effect.warn_of_outer_step(outer, settings.interval, total_steps)
    return settings


def _tail_average(
    given: float | None, wanted: float, total_steps: int | None, probe: object, model: nn.Module | None
) -> float:
    """What the user wants, or what the controller wants where that is possible."""
    if given is not None:
        return tail.check_part(given, total_steps, probe, model)
    return wanted if wanted and tail.unfit(probe, model) is None else 0.0


def _tail_told(given: float | None, wanted: float, probe: object, model: nn.Module | None) -> dict[str, str]:
    """What is said in the record of an average that the controller wants."""
    if given is not None or not wanted:
        return {}
    reason = tail.unfit(probe, model)
    if reason is not None:
        return {"tail average": f"none: {reason}"}
    part = f"the last {100 * wanted:.0f} % of the run"
    return {"tail average": f"of the round ends in {part}; the probe compares it with the last weights when it ends"}


def _controller(controller: Controller | None, probe: object) -> Controller:
    if controller is None:
        return Fixed() if probe is None else Auto()
    checks.check_controller(controller)
    return controller


def _check(
    controller: Controller,
    probe: object,
    gradients: Gradients,
    model: nn.Module | None,
    act: bool,
    guard: object,
    optimizers: Sequence[Optimizer],
    explored: Sequence[Hyperparameter],
) -> None:
    checks.check_model(model, optimizers)
    checks.check_gradients(gradients, explored, model, act and not isinstance(controller, Fixed))
    checks.check_line_search(controller, explored)
    checks.check_probe(probe, explored, controller, act, model)
    if gradients == "shared":
        checks.check_buffers(explored, model)
    if guard:
        checks.check_guard(guard, optimizers)


def _replicas(where: Where | None) -> int | None:
    """How many there are; None if they come only later, as they may where several processes were launched."""
    size = find_replicas(where).size
    launched = os.environ.get("WORLD_SIZE") not in (None, "", "1")
    return None if size == 1 and launched and not dist.is_initialized() else size


def _is_rate(h: Hyperparameter) -> bool:
    return isinstance(h, InGroups) and h.key == "lr"


def _kind(probe: AnyProbe | None) -> object:
    """What can be compared of a probe: a function's name, as what it holds may differ (a device)."""
    if probe is None or isinstance(probe, Probe):
        return probe
    return getattr(probe, "__qualname__", type(probe).__qualname__)
