"""A run's own measurements: seconds, losses, scales. They are saved, so that a resumed run reports all of them."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet import Ensemble, find_replicas
from hdet.records import RoundRecord, describe
from hdet_lab.folder import RunFolder
from hdet_lab.options import RunOptions
from hdet_lab.recipe import Recipe
from hdet_lab.status_line import StatusLine
from hdet_lab.tasks import Task

LINES_PER_RUN = 200


class Clock:
    """The seconds of a run: up to its checkpoint and since then. Work that was lost and repeated counts once."""

    def __init__(self, before: float) -> None:
        self._before, self._since = before, time.perf_counter()

    @property
    def seconds(self) -> float:
        """Until now."""
        return self._before + time.perf_counter() - self._since

    def leave_out(self, seconds: float) -> None:
        """Do not count these seconds."""
        self._before -= seconds

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before, self._since = state["seconds"], time.perf_counter()


class Scales:
    """Collects the scales of a run while they matter: `found` at `step`."""

    def __init__(self, optimizer: Optimizer, peak_lr: float) -> None:
        self.found: dict[str, float] = {}
        self.step = 0
        self._optimizer, self._peak_lr = optimizer, peak_lr

    def __call__(self, record: RoundRecord) -> None:
        """Take a round's scales, unless the learning rate has fallen below half of its peak."""
        if self._optimizer.param_groups[0]["lr"] >= self._peak_lr / 2:
            self._take({name: row.scale for name, row in record.hyperparameters.items()}, record.step)

    def end(self, ensemble: Ensemble, step: int) -> None:
        """Called after the last step, for a run that had no round in that time."""
        if not self.found:
            self._take(dict(ensemble.scales), step)

    def state_dict(self) -> dict[str, Any]:
        return {"found": self.found, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._take(state["found"], state["step"])

    def _take(self, found: dict[str, float], step: int) -> None:
        self.found, self.step = found, step


class Meter:
    """The mean loss of all replicas since the last line, a few hundred times in a run.

    Attributes:
        last: the mean loss in the last line.
    """

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
        self._every = max(1, steps // LINES_PER_RUN)
        self._losses: list[Tensor] = []
        self._rate = self._center()  # of the step under way
        method = options.controller if options.fans_out else "plain"
        title = f"{options.task}, {method}, peak {peak_lr:.1e}, seed {options.seed}"
        self._line = StatusLine(title, steps, files is not None)

    def start_from(self, step: int, losses: list[float]) -> None:
        """Continue a run that has taken `step` steps and seen these losses since its last line."""
        self._losses = [torch.tensor(loss, dtype=torch.float64) for loss in losses]
        self._rate = self._center()
        self._line.start_from(step)

    @property
    def losses(self) -> list[float]:
        """This replica's losses since the last line."""
        return [float(loss) for loss in self._losses]

    def step(self, step: int, loss: Tensor) -> None:
        """One step was taken."""
        self._losses.append(loss.detach())
        self._line.step()
        if step % self._every == 0 or step == self._steps:
            self._write(step)
        self._rate = self._center() if self._files is not None else 0.0

    def close(self) -> None:
        self._replicas.close()
        self._line.close()

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last = state["last"]

    def _write(self, step: int) -> None:
        device = self._losses[-1].device
        mean = torch.stack([loss.to(device, torch.float64) for loss in self._losses]).mean().reshape(1)
        self._losses.clear()
        everyone = self._replicas.gather(mean)
        self.last = sum(row[0] for row in everyone) / len(everyone)
        if self._files is not None:
            self._files.append("losses.jsonl", {"step": step, "loss": self.last, "lr": self._rate})
            last = self._files.last_round
            did = "" if last is None else f"; round {last.round}: {describe(last)}"
            self._line.show(step, self.last, f"{self._rate:.1e}{did}")

    def _center(self) -> float:
        """The first parameter group's learning rate: the schedule times the controller's scale."""
        scales = {} if self._ensemble is None else self._ensemble.scales
        scale = next((scale for name, scale in scales.items() if name.startswith("learning_rate")), 1.0)
        return float(self._schedule.get_last_lr()[0]) * scale


class HeldOutCurve:
    """The held-out loss of the replicas' average, every few steps. Its time does not count as the run's."""

    def __init__(
        self,
        every: int | None,
        clock: Clock,
        task: Task,
        model: nn.Module,
        optimizer: Optimizer,
        recipe: Recipe,
        ensemble: Ensemble | None,
        files: RunFolder | None,
    ) -> None:
        self._every, self._clock, self._files = every, clock, files
        self._task, self._model, self._optimizer, self._recipe = task, model, optimizer, recipe
        self._ensemble = ensemble

    def step(self, step: int) -> None:
        """After step number `step`; collective."""
        if not self._every or step % self._every:
            return
        began = self._clock.seconds
        average = nullcontext() if self._ensemble is None else self._ensemble.consensus()
        with average, self._recipe.evaluating(self._task, self._model, self._optimizer):
            if self._files is not None:
                loss = self._task.evaluate(self._model)["loss"]
                self._files.append("held_out.jsonl", {"step": step, "seconds": round(began, 3), "loss": loss})
        self._clock.leave_out(self._clock.seconds - began)
