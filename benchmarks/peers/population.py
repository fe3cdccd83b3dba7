"""Population-based training (Jaderberg et al., 2017) at the total compute of one plain run.

Four members share what one run would cost, in one of two ways. "batch": each takes every step, on its quarter of the
global batch, as when each of four replicas becomes a member; its gradients are noisier. "steps": each takes a quarter
of the steps on the whole batch; its run is shorter. Which one is better depends on the task, so both are run.

The members' rates begin on a grid over two decades around the start. 20 times in a run all are scored on the same
fresh training samples; the worst takes the weights and the optimizer of the best, and its rate times 0.8 or 1.2. Rates
are peaks of OneCycleLR: on a constant rate every method here would lose what annealing brings. What the scores cost, a
third of a step for each batch, is taken from the steps. The result is the member with the best last score.
"""

from __future__ import annotations

import copy
import math
import random
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from hdet_lab.options import RunOptions
from hdet_lab.tasks import Batch, Task

MEMBERS, SPREAD = 4, 10.0
_PERTURBATIONS = (0.8, 1.2)
_PROBE_BATCHES = 4  # of `Task.probe`


@dataclass
class _Member:
    model: nn.Module
    optimizer: Optimizer
    schedule: OneCycleLR
    rate: float

    def step(self, task: Task, batch: Batch) -> None:
        task.loss(self.model, batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()

    @torch.no_grad()
    def score(self, task: Task, batches: list[Batch]) -> float:
        self.model.eval()
        loss = sum(float(task.loss(self.model, batch)) for batch in batches) / len(batches)
        self.model.train()
        return loss if math.isfinite(loss) else math.inf

    def take_over(self, other: _Member, factor: float) -> None:
        self.model.load_state_dict(other.model.state_dict())
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        self.rate = other.rate * factor
        for group in self.optimizer.param_groups:
            for name in ("initial_lr", "max_lr", "min_lr"):  # what OneCycleLR computes from
                group[name] *= factor


def population(options: RunOptions, share: Literal["batch", "steps"]) -> dict[str, Any]:
    """Train; the result in the words of the lab's result.json, with its cost in steps on the global batch."""
    task = options.make_task()
    rounds = max(2, min(20, task.steps // 50))
    scoring = rounds * MEMBERS * _PROBE_BATCHES / 3
    each = max(rounds, int((task.steps - scoring) / (MEMBERS if share == "steps" else 1)))
    members = [make_member(options, task, rate, each) for rate in _rates(options.peak_lr or task.peak_lr)]
    dice = random.Random(options.seed)
    scores: list[float] = []
    for step in range(each):
        for number, member in enumerate(members):
            whole = share == "steps"
            batch = task.batch(step * MEMBERS + number) if whole else task.batch(step, number, MEMBERS)
            member.step(task, batch)
        done = (step + 1) * rounds // each
        if done > step * rounds // each:
            scores = [member.score(task, task.probe(done)) for member in members]
            if done < rounds:
                order = sorted(range(MEMBERS), key=scores.__getitem__)
                members[order[-1]].take_over(members[order[0]], dice.choice(_PERTURBATIONS))
    best = members[scores.index(min(scores))]
    cost = scoring + each * (MEMBERS if share == "steps" else 1)
    return {"held_out": task.evaluate(best.model), "steps": each, "peak_lr": best.rate, "cost": cost / task.steps}


def _rates(start: float) -> list[float]:
    return [start * SPREAD ** (2 * number / (MEMBERS - 1) - 1) for number in range(MEMBERS)]


def make_member(options: RunOptions, task: Task, rate: float, steps: int) -> _Member:
    model = task.model()
    optimizer = task.optimizer(model, rate, options.optimizer)
    return _Member(model, optimizer, OneCycleLR(optimizer, max_lr=rate, total_steps=steps), rate)
