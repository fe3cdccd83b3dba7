"""What is written down while a run trains: its training losses, and its held-out loss where that was asked for."""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet import Ensemble, describe, find_replicas
from hdet.lab.folder import RunFolder
from hdet.lab.options import RunOptions
from hdet.lab.progress import Progress
from hdet.lab.recipe import Recipe
from hdet.lab.tasks import Task

_LINES_PER_RUN = 200


class Meter:
    """The mean loss of all replicas since the last line, a few hundred times in a run."""

    def __init__(
        self,
        options: RunOptions,
        peak_lr: float,
        steps: int,
        schedule: LRScheduler,
        ensemble: Ensemble | None,
        files: RunFolder | None,
    ) -> None:
        self.last = float("nan")
        self._schedule, self._ensemble, self._files = schedule, ensemble, files
        self._replicas = find_replicas()
        self._steps = steps
        self._every = max(1, steps // _LINES_PER_RUN)
        self._losses: list[Tensor] = []
        self._rate = self._center()  # of the step under way
        method = options.controller if options.fans_out else "plain"
        title = f"{options.task}, {method}, peak {peak_lr:.1e}, seed {options.seed}"
        self._progress = Progress(title, steps, files is not None)

    def step(self, step: int, loss: Tensor) -> None:
        """After step number `step`, with this replica's loss."""
        self._losses.append(loss.detach())
        self._progress.step()
        if step % self._every == 0 or step == self._steps:
            self._write(step)
        self._rate = self._center() if self._files is not None else 0.0

    def close(self) -> None:
        """After the last one."""
        self._replicas.close()
        self._progress.close()

    def _write(self, step: int) -> None:
        mean = torch.stack(self._losses).double().mean().reshape(1)
        self._losses.clear()
        everyone = self._replicas.gather(mean)
        self.last = sum(row[0] for row in everyone) / len(everyone)
        if self._files is not None:
            self._files.append("losses.jsonl", {"step": step, "loss": self.last, "lr": self._rate})
            last = self._files.last_round
            did = "" if last is None else f"; round {last.round}: {describe(last)}"
            self._progress.show(step, self.last, f"{self._rate:.1e}{did}")

    def _center(self) -> float:
        """The first parameter group's learning rate: the schedule, and what a controller has made of it."""
        scales = {} if self._ensemble is None else self._ensemble.scales
        scale = next((scale for name, scale in scales.items() if name.startswith("learning_rate")), 1.0)
        return float(self._schedule.get_last_lr()[0]) * scale


class HeldOutCurve:
    """The held-out loss of the average of the replicas, every few steps. The time that it takes is not the run's.

    Attributes:
        seconds: what was spent here.
    """

    def __init__(
        self,
        every: int | None,
        started: float,
        task: Task,
        model: nn.Module,
        optimizer: Optimizer,
        recipe: Recipe,
        ensemble: Ensemble | None,
        files: RunFolder | None,
    ) -> None:
        self.seconds = 0.0
        self._every, self._files = every, files
        self._task, self._model, self._optimizer, self._recipe = task, model, optimizer, recipe
        self._ensemble, self._started = ensemble, started

    def step(self, step: int) -> None:
        """After step number `step`; collective."""
        if not self._every or step % self._every:
            return
        began = time.perf_counter()
        average = nullcontext() if self._ensemble is None else self._ensemble.consensus()
        with average, self._recipe.evaluating(self._task, self._model, self._optimizer):
            if self._files is not None:
                loss = self._task.evaluate(self._model)["loss"]
                seconds = round(began - self._started - self.seconds, 3)
                self._files.append("held_out.jsonl", {"step": step, "seconds": seconds, "loss": loss})
        self.seconds += time.perf_counter() - began
