"""Makes an ensemble from options: its hyperparameters, controller and probe."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet import (
    Auto,
    Averaging,
    Ensemble,
    FoundRate,
    Hyperparameter,
    Nesterov,
    Probe,
    Scalar,
    dropout,
    learning_rate,
    momentum,
    scalar,
    weight_decay,
)
from hdet.controllers import Fixed, LineSearch, Plan, Slope, Softmax
from hdet.records import RoundRecord
from hdet_lab.errors import LabError
from hdet_lab.options import RunOptions
from hdet_lab.tasks import Batch, Task

_PROBE_BATCHES = 4  # global batches in a probe


def make_probe(options: RunOptions, task: Task) -> Probe:
    """Four global batches, drawn again for each round; held-out ones if a regulariser is explored.

    Held-out batches come from one half of the held-out data, and such a run reports its loss on the other half.
    """
    held_out = options.probes_held_out

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return task.loss(model, batch)

    return Probe(lambda index: task.probe(index, held_out), loss, held_out=held_out)


def charged_steps(options: RunOptions, task: Task, model: nn.Module, found: FoundRate | None) -> int:
    """The task's steps less the cost of finder and probes; a forward pass costs a third of a step.

    In each round every replica scores its own weights on the full probe, and all share scoring the round's initial
    weights. The length of rounds depends on that of the run: the shortened run's counts, not the requested one's.
    """
    if not options.probes:
        return task.steps
    left = float(task.steps)
    if found is not None:
        left -= found.steps + found.samples / 3 / task.global_batch
        if left < 1:
            raise LabError(
                f"finding the rate costs all of the {task.steps} steps; take a longer run, or leave --charge out"
            )
    steps = max(1, math.floor(left))
    while True:  # shorter runs have shorter rounds, so the number of steps only falls
        plan: Plan = make_controller(options, steps, found is not None).plan(list(options.explored()), steps)
        wanted = plan.tail_average if any(options.explored().values()) else 0.0
        part = wanted if options.tail_average is None else options.tail_average
        end = Ensemble.probes_at_end(part, make_probe(options, task), model) * _PROBE_BATCHES / 3
        if left - end < 1:
            raise LabError(
                f"the comparison at the end of the run costs all of the {task.steps} steps; take a longer run, or "
                "leave out --charge or --tail-average"
            )
        paid = max(1, math.floor((left - end) / (1 + _probing(options, plan, steps))))
        if paid >= steps:
            return steps
        steps = paid


def _probing(options: RunOptions, plan: Plan, steps: int) -> float:
    """The cost of the rounds' probes per step of the run, in steps; 0 if nothing is explored."""
    part = max((plan.until.get(name, steps) for name in options.explored()), default=0) / steps
    interval = plan.auto_interval(steps) if options.interval == "auto" else options.interval
    return part * (options.replicas + 1) * _PROBE_BATCHES / 3 / (interval or 1)


def make_smoothing(options: RunOptions) -> Scalar:
    """The label smoothing that the training loss reads."""
    spread = options.explored().get("label_smoothing", 0.0)
    return scalar("label_smoothing", options.label_smoothing, bounds=(0.0, 0.9), regulariser=True, **_ladder(spread))


def make_ensemble(
    options: RunOptions,
    task: Task,
    steps: int,
    found: bool,
    model: nn.Module,
    optimizer: Optimizer,
    smoothing: Scalar,
    on_round: Sequence[Callable[[RoundRecord], object]],
) -> Ensemble | None:
    """The ensemble of a run; None for the plain schedule.

    Args:
        options: the run.
        task: its task.
        steps: its length.
        found: whether its rate was found before.
        model: the model.
        optimizer: its optimizer.
        smoothing: the label smoothing.
        on_round: sinks for its records.
    """
    if not options.fans_out:
        return None
    return Ensemble(
        optimizer,
        _hyperparameters(options, model, optimizer, smoothing),
        total_steps=steps,
        interval=options.interval,
        controller=make_controller(options, steps, found),
        probe=make_probe(options, task) if options.probes else None,
        gradients=options.gradients,
        model=model,
        averaging=Averaging(make_outer_step(options), options.tail_average, options.average_state),
        seed=options.seed,
        on_round=on_round,
    )


def make_outer_step(options: RunOptions) -> float | Nesterov | None:
    """The outer step; None for the controller's choice."""
    if options.outer_momentum is None:
        return options.outer_step
    default = Nesterov()
    return Nesterov(default.lr if options.outer_step is None else options.outer_step, options.outer_momentum)


def make_controller(options: RunOptions, steps: int, found: bool = False) -> Any:
    """The controller of that name.

    If `Auto` found a rate, it keeps it, even if the remaining run is short enough for a line search.
    """
    if options.controller == "softmax":
        warmup = steps // 3 if options.warmup_steps is None else options.warmup_steps
        return Softmax(temperature=options.temperature, warmup_steps=warmup)
    if options.controller == "auto":
        short = min(Auto.short, steps - 1) if found else Auto.short
        return Auto(finds=False, short=short)  # it is found before the schedule is made
    kinds: dict[str, type[Any]] = {"fixed": Fixed, "line_search": LineSearch, "slope": Slope}
    return kinds[options.controller]()


def _hyperparameters(
    options: RunOptions, model: nn.Module, optimizer: Optimizer, smoothing: Scalar
) -> list[Hyperparameter]:
    per_group = options.task == "flights" and not options.probes if options.per_group is None else options.per_group
    found: list[Any] = []
    for name, spread in options.explored().items():
        ladder = _ladder(spread)
        if name == "learning_rate":
            found += (
                learning_rate(optimizer, per_group=True, **ladder)
                if per_group
                else [learning_rate(optimizer, **ladder)]
            )
        elif name == "weight_decay":
            found += _listed(weight_decay(optimizer, **ladder))
        elif name in ("momentum", "beta2"):
            found += _listed(momentum(optimizer, beta=2 if name == "beta2" else 1, **ladder))
        elif name == "dropout":
            found.append(dropout(model, **ladder))
        else:
            found.append(smoothing)
    return found


def _listed(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [found]


def _ladder(spread: float) -> dict[str, Any]:
    return {"spread": spread, "ladder": "linear" if spread < 1 else "log"}


def device() -> torch.device:
    """This process's GPU if there is one, otherwise the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
