"""The classic learning-rate range test (Smith), then OneCycleLR: rates from 1e-7 to 10 in 100 steps.

The training losses are smoothed exponentially by 0.98, corrected for the start; the test ends at four times the lowest.
Two rules are in use: a tenth of the rate at the minimum, and the rate at which the smoothed loss falls fastest.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from hdet import data_parallel, find_replicas
from hdet_lab.options import RunOptions
from hdet_lab.tasks import Task

LOWEST, HIGHEST, STEPS = 1e-7, 10.0, 100
_SMOOTH, _DIVERGED = 0.98, 4.0
_SKIPPED = 10  # the first smoothed losses say little about a slope


def range_test(options: RunOptions, rule: Literal["minimum", "steepest"]) -> tuple[float, int]:
    """The rate for OneCycleLR's peak, and the steps that it took to find it. Collective."""
    task, replicas = options.make_task(), find_replicas()
    model = data_parallel(task.model())
    optimizer = task.optimizer(model, LOWEST, options.optimizer)
    losses: list[float] = []
    count = length(task)
    for step in range(count):
        for group in optimizer.param_groups:
            group["lr"] = _rate(step, count)
        loss = task.loss(model, task.batch(step, replicas.rank, replicas.size))
        loss.backward()
        everyone = replicas.gather(loss.detach().double().reshape(1))
        losses.append(sum(row[0] for row in everyone) / len(everyone))
        if not math.isfinite(losses[-1]) or smoothed(losses)[-1] > _DIVERGED * min(smoothed(losses)):
            break
        optimizer.step()
        optimizer.zero_grad()
    replicas.close()
    return suggest([_rate(step, count) for step in range(len(losses))], losses, rule), len(losses)


def length(task: Task) -> int:
    """Steps of the test: 100, and less where that would be more than a quarter of the run."""
    return min(STEPS, max(2, task.steps // 4))


def suggest(rates: list[float], losses: list[float], rule: Literal["minimum", "steepest"]) -> float:
    finite = [loss for loss in smoothed(losses) if math.isfinite(loss)]
    if rule == "minimum":
        return rates[finite.index(min(finite))] / 10
    skipped = _SKIPPED if len(finite) > 2 * _SKIPPED else 0
    slopes = torch.gradient(torch.tensor(finite[skipped:], dtype=torch.float64))[0]
    return rates[skipped + int(slopes.argmin())]


def smoothed(losses: list[float]) -> list[float]:
    mean, found = 0.0, []
    for number, loss in enumerate(losses, 1):
        mean = _SMOOTH * mean + (1 - _SMOOTH) * loss
        found.append(mean / (1 - _SMOOTH**number))
    return found


def _rate(step: int, count: int) -> float:
    return LOWEST * (HIGHEST / LOWEST) ** (step / max(1, count - 1))
