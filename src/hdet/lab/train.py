"""One run, as every replica lives it: under torchrun, under `hdet` and under `hdet.in_process` alike.

torchrun --standalone --nproc-per-node 2 -m hdet.lab.train text --peak-lr 1e-3
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from hdet import Auto, Ensemble, FoundRate, Nesterov, RoundRecord, data_parallel, describe, find_replicas, load, save
from hdet.lab.finder import find
from hdet.lab.folder import RunFolder, plain
from hdet.lab.options import RunOptions
from hdet.lab.progress import Progress
from hdet.lab.setup import charged_steps, device, make_ensemble, make_outer_step, make_smoothing
from hdet.lab.tasks import Task

_LINES_PER_RUN = 200


def train(options: RunOptions, folder: str | Path) -> dict[str, Any]:
    """Train once, collectively; the first replica writes `folder`. What is in result.json, on every replica.

    A run with checkpoints in `folder` goes on from the last one.

    The losses on the held-out data are those of the average of the replicas, and known to the first one only:
    `held_out` of all samples, `held_out_unseen` of the half that no held-out probe draws from. The first is the
    result of a run without such a probe, the second of a run with one and of those that are compared with it.

    `scales` are the factors that the controller has put on the schedules at step `scales_step`, the end of the last
    round before the learning rate falls below half of its peak. Later, with the rate on its way to zero, no scale
    changes the loss much, and what a controller makes of it says little: rounds.jsonl has the whole course.
    """
    replicas = find_replicas()
    first = replicas.rank == 0
    files = RunFolder(folder) if first else None
    if files is not None:
        files.begin(options)
    task = options.make_task()
    peak_lr = task.peak_lr if options.peak_lr is None else options.peak_lr
    model = data_parallel(task.model().to(device()))
    decay = {} if options.weight_decay is None else {"weight_decay": options.weight_decay}
    optimizer = task.optimizer(model, peak_lr, options.optimizer, **decay)
    smoothing = make_smoothing(options)

    started = time.perf_counter()
    found = _find(options, task, model, optimizer)
    if found is not None:
        peak_lr = found.rate
    steps = charged_steps(options, task, found) if options.charge else task.steps
    schedule = OneCycleLR(optimizer, max_lr=peak_lr, total_steps=steps)
    scales = _Scales(schedule)
    sinks: list[Callable[[RoundRecord], None]] = [scales]
    if files is not None:
        sinks.append(files.record)
    ensemble = make_ensemble(options, task, steps, model, optimizer, smoothing, sinks)
    run = {"model": model, "optimizer": optimizer, "schedule": schedule}
    run |= {} if ensemble is None else {"ensemble": ensemble}
    checkpoints = Path(folder) / "checkpoints"
    first_step = _resume(checkpoints, run, files) if options.checkpoint_every else 0
    meter = _Meter(options, steps, schedule, ensemble, files)
    for step in range(first_step, steps):
        batch = task.batch(task.steps - steps + step, replicas.rank, replicas.size)  # what was charged is not seen
        loss = task.loss(model, batch, smoothing.value)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if ensemble is not None:
            ensemble.step(loss)  # the last one averages the replicas
        meter.step(step + 1, loss)
        if options.checkpoint_every and (step + 1) % options.checkpoint_every == 0:
            save(checkpoints, run, step=step + 1)
    seconds = time.perf_counter() - started
    meter.close()
    if ensemble is not None:
        scales.end(ensemble, steps)
        ensemble.close()
    measured = {
        "seconds": round(seconds, 3),
        "train_loss": meter.last,
        "scales": scales.found,
        "scales_step": scales.step,
        "held_out": task.evaluate(model) if first else None,
        "held_out_unseen": task.evaluate(model, unseen=True) if first else None,
    }
    cost = {} if found is None else {"finder_steps": found.steps, "finder_cost": found.cost}
    result: dict[str, Any] = plain({**_settings(options, task, steps, peak_lr), **cost, **measured})
    if files is not None:
        files.write("result.json", result)
    return result


def _resume(checkpoints: Path, run: dict[str, Any], files: RunFolder | None) -> int:
    """Go on from the last checkpoint, if there is one; the step to begin with."""
    resumed = load(checkpoints, run)
    step = 0 if resumed is None else resumed.step
    if files is not None:
        for name in ("losses.jsonl", "rounds.jsonl"):
            files.rewind(name, step)
    return step


def _find(options: RunOptions, task: Task, model: nn.Module, optimizer: Optimizer) -> FoundRate | None:
    """The rate that `Auto` looks for before a long run; None in other runs."""
    if options.controller != "auto" or not Auto().plan(list(options.explored()), task.steps).finds:
        return None
    outer = make_outer_step(options)
    if isinstance(outer, Nesterov):
        outer = min(outer.lr / (1 - outer.momentum), 1.0)
    return find(options, task, model, optimizer, Auto().outer_step if outer is None else outer)


def _settings(options: RunOptions, task: Task, steps: int, peak_lr: float) -> dict[str, Any]:
    """What a result is the result of."""
    copied = {name: getattr(options, name) for name in ("task", "size", "seed", "replicas", "optimizer", "controller")}
    about = {"steps": steps, "marginal_loss": task.marginal_loss, "held_out_probe": options.probes_held_out}
    return {**copied, "peak_lr": peak_lr, **about}


class _Scales:
    """Collects the scales of a run while they matter: `found` at `step`."""

    def __init__(self, schedule: OneCycleLR) -> None:
        self.found: dict[str, float] = {}
        self.step = 0
        self._group = schedule.optimizer.param_groups[0]

    def __call__(self, record: RoundRecord) -> None:
        if self._group["lr"] >= self._group["max_lr"] / 2:
            self._take({name: row.scale for name, row in record.hyperparameters.items()}, record.step)

    def end(self, ensemble: Ensemble, step: int) -> None:
        """After the last step of a run that had no round in that time."""
        if not self.found:
            self._take(dict(ensemble.scales), step)

    def _take(self, found: dict[str, float], step: int) -> None:
        self.found, self.step = found, step


class _Meter:
    """The mean loss of all replicas since the last line, a few hundred times in a run."""

    def __init__(
        self, options: RunOptions, steps: int, schedule: OneCycleLR, ensemble: Ensemble | None, files: RunFolder | None
    ) -> None:
        self.last = float("nan")
        self._schedule, self._ensemble, self._files = schedule, ensemble, files
        self._replicas = find_replicas()
        self._steps = steps
        self._every = max(1, steps // _LINES_PER_RUN)
        self._losses: list[Tensor] = []
        self._rate = self._center()  # of the step under way
        peak = max(group["max_lr"] for group in schedule.optimizer.param_groups)
        method = options.controller if options.fans_out else "plain"
        title = f"{options.task}, {method}, peak {peak:.1e}, seed {options.seed}"
        self._progress = Progress(title, steps, files is not None)

    def step(self, step: int, loss: Tensor) -> None:
        self._losses.append(loss.detach())
        self._progress.step()
        if step % self._every == 0 or step == self._steps:
            self._write(step)
        self._rate = self._center() if self._files is not None else 0.0

    def close(self) -> None:
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


if __name__ == "__main__":
    from hdet.lab.worker import main

    sys.exit(main())
