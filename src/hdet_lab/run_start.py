"""Decides a run's peak rate and length before its first step. A resumed run keeps both."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hdet import Auto, Nesterov, find_replicas
from hdet.records.reading import UnreadableError
from hdet.records.schema import fields, record
from hdet_lab.ensemble_from_options import charged_steps, device, make_outer_step
from hdet_lab.finder import find, result_of, write
from hdet_lab.folder import RunFolder, read_if_good
from hdet_lab.options import RunOptions
from hdet_lab.tasks import Task

_FILE = "start.json"


@dataclass(frozen=True)
class RunStart:
    """The start of a run.

    Attributes:
        peak_lr: the peak of its schedule, found or given.
        steps: its length, less the steps charged for finder and probes.
        finder_steps: steps of the search for the rate; 0 without a search.
        finder_cost: cost of the search in training steps, including the scoring.
        seconds: duration of the search.
    """

    peak_lr: float
    steps: int
    finder_steps: int = 0
    finder_cost: float = 0.0
    seconds: float = 0.0


_START = record(fields(RunStart))


def resolve_start(
    options: RunOptions, task: Task, model: nn.Module, optimizer: Optimizer, peak_lr: float, files: RunFolder | None
) -> RunStart:
    """Determine the start of the run; a resumed run keeps its own. Collective.

    Args:
        options: the run.
        task: its task.
        model: the model to find a rate for, if requested.
        optimizer: the model's optimizer.
        peak_lr: the initial rate, or the start of the search.
        files: the first replica's output; None on the others.

    Raises:
        NoRateError: if a rate is searched for and the loss does not fall at any.
    """
    known = _known(files, task.steps) if options.checkpoint_every else None
    if known is not None:
        return known
    found = None
    if options.controller == "auto" and Auto().plan(list(options.explored()), task.steps, find_replicas().size).finds:
        outer = make_outer_step(options)
        if isinstance(outer, Nesterov):
            outer = min(outer.lr / (1 - outer.momentum), 1.0)
        found = find(options, task, model, optimizer, Auto().outer_step if outer is None else outer)
        if files is not None:
            write(result_of(options, task, peak_lr, found), found, files)
    steps = charged_steps(options, task, model, found) if options.charge else task.steps
    start = RunStart(peak_lr, steps)
    if found is not None:
        start = RunStart(found.rate, steps, found.steps, found.cost, found.seconds)
    if files is not None and options.checkpoint_every:
        files.write(_FILE, start)
    return start


def _known(files: RunFolder | None, most_steps: int) -> RunStart | None:
    """Share the first replica's saved start with all replicas, which may not see its folder."""

    def check(value: Any) -> RunStart:
        start = RunStart(**_START(value))
        if start.peak_lr <= 0 or not 1 <= start.steps <= most_steps or start.finder_steps < 0:
            raise UnreadableError(f"it is no start of a run of {most_steps} steps")
        return start

    told = None if files is None else read_if_good(files.path / _FILE, check)
    numbers = [0.0] * len(dataclasses.fields(RunStart)) if told is None else list(told.__dict__.values())
    replicas = find_replicas()
    everyone = replicas.gather(torch.tensor(numbers, dtype=torch.float64, device=device()))
    replicas.close()
    peak_lr, steps, finder_steps, *rest = everyone[0]
    return RunStart(peak_lr, int(steps), int(finder_steps), *rest) if steps else None
