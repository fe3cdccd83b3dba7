"""The arguments of an ensemble: checked, completed, and compared with the other replicas'."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet._arguments import check_flag
from hdet._explore.hyperparameter import Hyperparameter, flatten
from hdet._explore.in_groups import is_rate, learning_rate
from hdet._explore.slots import Design, check_design
from hdet._hooks import unwrap
from hdet._options.averaging import Averaging
from hdet._options.safety import Safety
from hdet._probe.judge import AnyProbe
from hdet._probe.probe import Probe
from hdet._replicas import Where, check_where, find_replicas
from hdet._replicas.fingerprint import Claims, fingerprint, plain
from hdet._run import checks, no_effect
from hdet._run.tail_fit import check_part, unfit
from hdet._tensors.deepspeed import check_deepspeed
from hdet._tensors.local_gradients import Gradients
from hdet._tensors.shards import check_shards, reshard
from hdet.controllers import Auto, Controller, Fixed, Plan
from hdet.controllers.report import plan
from hdet.records.record import OnRound


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Arguments:
    """The arguments of `hdet.Ensemble`, which documents them."""

    optimizer: Optimizer | Sequence[Optimizer]
    hyperparameters: Sequence[Hyperparameter | Sequence[Hyperparameter]] | None
    total_steps: int | None
    interval: int | Literal["auto"]
    controller: Controller | None
    probe: AnyProbe | None
    gradients: Gradients
    design: Design | None
    model: nn.Module | None
    averaging: Averaging | None
    safety: Safety | None
    replicas: Where | None
    seed: int
    observe_only: bool
    on_round: Sequence[OnRound]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Settings(Arguments):
    """The arguments, checked and completed. They stay fixed for the lifetime of an ensemble.

    Attributes:
        hyperparameters: all of them, including the learning rate that a rollback cuts.
        explored: those with different values on the replicas.
        plan: the controller's plan for this run.
    """

    optimizer: tuple[Optimizer, ...]
    hyperparameters: tuple[Hyperparameter, ...]
    interval: int
    controller: Controller
    design: Design
    averaging: Averaging
    safety: Safety
    on_round: tuple[OnRound, ...]
    explored: tuple[Hyperparameter, ...]
    plan: Plan

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Those that step together."""
        return self.optimizer

    @property
    def local(self) -> bool:
        """Whether gradients are local."""
        return self.gradients == "local"

    @property
    def diverges(self) -> bool:
        """Whether replicas hold different weights within a round."""
        return bool(self.explored) or self.local

    @property
    def rates(self) -> list[str]:
        """The names of the hyperparameters that are learning rates."""
        return [h.name for h in self.hyperparameters if is_rate(h)]

    def told(self) -> dict[str, object]:
        """All arguments but the hyperparameters, as plain values to compare with the other replicas'."""
        options = {
            "seed": self.seed, "interval": self.interval, "total_steps": self.total_steps,
            "observe_only": self.observe_only, "controller": self.controller, "gradients": self.gradients,
            "design": self.design, "probe": self.probe is not None, **self.averaging.told(), **self.safety.told(),
        }  # fmt: skip
        return {name: plain(value) for name, value in options.items()}

    def claims(self, replicas: int, step: int, followers: Iterable[Tensor]) -> Claims:
        """The values that must be equal on all replicas before the first step."""
        options = {**self.told(), "replicas": replicas, "the step to go on from": step, "probe": _kind(self.probe)}
        return fingerprint(
            options, self.optimizers, self.model, self.hyperparameters, followers, compare_tensors=self.diverges
        )


def instead(write: str) -> dict[str, str]:
    """Map misplaced options, and other names for them, to what to write instead.

    Args:
        write: the format of an argument of `hdet.Ensemble`, such as "{}={}".
    """
    names = {"tail_average": "tail", "average_state": "state", "also": "followers"}
    found = {name: write.format("safety", f"hdet.Safety({name}=...)") for name in _names(Safety)}
    for name in (*_names(Averaging), *names):
        found[name] = write.format("averaging", f"hdet.Averaging({names.get(name, name)}=...)")
    for name in ("process_group", "mesh"):
        found[name] = write.format("replicas", name)
    found["act"] = write.format("observe_only", "True") + " for act=False"
    found["start_step"] = "ensemble.start_from(start_step) once it is made"
    return found


def read_settings(given: Arguments) -> Settings:
    """Check and complete the arguments of an ensemble.

    Raises:
        TypeError, ValueError: if the arguments cannot work; the message says what to write instead.
    """
    check_deepspeed(given.optimizer, given.model, given.gradients)
    if isinstance(given.model, nn.Module):
        reshard(given.model)  # while whole weights are gathered, the model has other parameters
    several = given.optimizer if isinstance(given.optimizer, Sequence) else (given.optimizer,)
    optimizers = tuple(map(unwrap, several))
    explorable = flatten([learning_rate(optimizers)] if given.hyperparameters is None else given.hyperparameters)
    checks.check_hyperparameters(explorable, optimizers)
    explored = tuple(h for h in explorable if h.diverges)
    controller = _controller(given.controller, given.probe)
    averaging, safety = checks.check_averaging(given.averaging), checks.check_safety(given.safety)
    where = check_where(given.replicas)
    _check(given, controller, averaging, safety, optimizers, explored)
    wanted = plan(controller, [h.name for h in explorable], given.total_steps, _replicas(where))
    if safety.rollback is not None and not any(map(is_rate, explorable)):
        explorable.append(learning_rate(optimizers, spread=0.0))  # to be cut
    diverges = bool(explored) or given.gradients == "local"
    tail = wanted.tail_average if explored else 0.0  # with a spread of 0 it is plain training
    completed: dict[str, Any] = {
        "optimizer": optimizers,
        "hyperparameters": tuple(explorable),
        "explored": explored,
        "controller": controller,
        "plan": replace(wanted, why={**wanted.why, **_tail_told(given, averaging, tail)}),
        "interval": checks.check_interval(given.interval, given.total_steps, diverges, wanted),
        "design": check_design(given.design or wanted.design),
        "averaging": _completed(averaging, wanted, tail, given),
        "safety": safety,
        "on_round": tuple(given.on_round),
    }
    settings = Settings(**{**vars(given), **completed})
    if settings.averaging.tail:  # the replicas split the probe data
        check_shards(optimizers, given.model, where, given.gradients)
    _warn(settings, searches=given.controller is not None and wanted.needs_line)
    return settings


def _names(options: type) -> list[str]:
    return [option.name for option in fields(options)]


def _completed(averaging: Averaging, wanted: Plan, tail: float, given: Arguments) -> Averaging:
    """The user's choices, completed by the controller's where the user made none and they are possible."""
    if averaging.tail is not None:
        tail = check_part(averaging.tail, given.total_steps, given.probe, given.model)
    elif tail and unfit(given.probe, given.model) is not None:
        tail = 0.0
    outer_step = wanted.outer_step if averaging.outer_step is None else averaging.outer_step
    return replace(averaging, outer_step=outer_step, tail=tail)


def _tail_told(given: Arguments, averaging: Averaging, wanted: float) -> dict[str, str]:
    """The record's event about a tail average that the controller asked for."""
    if averaging.tail is not None or not wanted:
        return {}
    reason = unfit(given.probe, given.model)
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
    given: Arguments,
    controller: Controller,
    averaging: Averaging,
    safety: Safety,
    optimizers: Sequence[Optimizer],
    explored: Sequence[Hyperparameter],
) -> None:
    """Raise for arguments that do not go together."""
    model, gradients = given.model, given.gradients
    check_flag("observe_only", given.observe_only)
    checks.check_on_round(given.on_round)
    checks.check_state(averaging, gradients)
    if gradients == "shared":
        checks.check_wrapper(model if isinstance(model, nn.Module) else None, given.replicas)
    checks.check_model(model, optimizers)
    acts = not given.observe_only
    checks.check_gradients(gradients, explored, model, acts and not isinstance(controller, Fixed))
    checks.check_line_search(controller, explored)
    checks.check_probe(given.probe, explored, controller, acts, model)
    if gradients == "shared":
        checks.check_buffers(explored, model)
    if safety.guard:
        checks.check_guard(optimizers)
    if explored or gradients == "local":
        checks.check_can_diverge(optimizers)
        check_shards(optimizers, model, given.replicas, gradients)


def _warn(settings: Settings, searches: bool) -> None:
    """Warn about options without effect; `searches` says whether the user asked for a line search."""
    interval, total_steps, averaging = settings.interval, settings.total_steps, settings.averaging
    no_effect.warn_without_effect(settings.controller, searches, settings.observe_only, bool(settings.explored))
    no_effect.warn_of_warm_up(settings.controller, bool(settings.explored), interval, total_steps)
    no_effect.warn_of_probe(settings.controller, settings.probe, settings.plan, settings.local, averaging.tail)
    no_effect.warn_of_bases(settings.explored)
    no_effect.warn_of_outer_step(averaging, interval, total_steps)


def _replicas(where: Where | None) -> int | None:
    """The number of replicas; None if several processes were launched and their group may come later."""
    size = find_replicas(where).size
    launched = os.environ.get("WORLD_SIZE") not in (None, "", "1")
    return None if size == 1 and launched and not dist.is_initialized() else size


def _kind(probe: AnyProbe | None) -> object:
    """The comparable part of a probe: a function's name only, because its contents may differ (a device)."""
    if probe is None or isinstance(probe, Probe):
        return probe
    return getattr(probe, "__qualname__", type(probe).__qualname__)
