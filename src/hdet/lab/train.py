"""One run, as every replica lives it: under torchrun, under `hdet` and under `hdet.in_process` alike.

torchrun --standalone --nproc-per-node 2 -m hdet.lab.train text --peak-lr 1e-3
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from hdet import Controller, Ensemble, Fixed, RoundRecord, Softmax, data_parallel, find_replicas, learning_rate
from hdet.lab.folder import RunFolder, plain
from hdet.lab.options import RunOptions
from hdet.lab.progress import Progress
from hdet.lab.tasks import Task

_LINES_PER_RUN = 200


def train(options: RunOptions, folder: str | Path) -> dict[str, Any]:
    """Train once, collectively; the first replica writes `folder`. What is in result.json, on every replica.

    The loss on the held-out data is that of the average of the replicas, and known to the first one only.
    """
    replicas = find_replicas()
    first = replicas.rank == 0
    files = RunFolder(folder) if first else None
    if files is not None:
        files.begin(options)
    task = options.make_task()
    peak_lr = task.peak_lr if options.peak_lr is None else options.peak_lr
    model = data_parallel(task.model().to(device()))
    optimizer = task.optimizer(model, peak_lr, options.optimizer)
    schedule = OneCycleLR(optimizer, max_lr=peak_lr, total_steps=task.steps)
    ensemble = _ensemble(options, task, model, optimizer, files)
    meter = _Meter(options, task, schedule, ensemble, files)

    started = time.perf_counter()
    for step in range(task.steps):
        loss = task.loss(model, task.batch(step, replicas.rank, replicas.size))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if ensemble is not None:
            ensemble.step(loss)  # the last one averages the replicas
        meter.step(step + 1, loss)
    seconds = time.perf_counter() - started
    meter.close()
    if ensemble is not None:
        ensemble.close()
    held_out = task.evaluate(model) if first else None
    measured = {"seconds": round(seconds, 3), "train_loss": meter.last, "held_out": held_out}
    result: dict[str, Any] = plain({**_settings(options, task, peak_lr), **measured})
    if files is not None:
        files.write("result.json", result)
    return result


def _settings(options: RunOptions, task: Task, peak_lr: float) -> dict[str, Any]:
    """What a result is the result of."""
    copied = {name: getattr(options, name) for name in ("task", "size", "seed", "replicas", "optimizer", "controller")}
    return {**copied, "peak_lr": peak_lr, "steps": task.steps, "marginal_loss": task.marginal_loss}


def _ensemble(
    options: RunOptions, task: Task, model: nn.Module, optimizer: Optimizer, files: RunFolder | None
) -> Ensemble | None:
    """What makes the replicas fan out and converge; None for the plain schedule."""
    if not options.fans_out:
        return None
    controller: Controller = Fixed()
    if options.controller == "softmax":
        warmup = task.steps // 3 if options.warmup_steps is None else options.warmup_steps
        controller = Softmax(temperature=options.temperature, warmup_steps=warmup)
    per_group = options.task == "flights" if options.per_group is None else options.per_group

    def write(record: RoundRecord) -> None:
        if files is not None:
            files.append("rounds.jsonl", record)

    rates = (
        learning_rate(optimizer, spread=options.spread, per_group=True)
        if per_group
        else [learning_rate(optimizer, spread=options.spread)]
    )
    return Ensemble(
        optimizer,
        rates,
        total_steps=task.steps,
        interval=options.interval,
        controller=controller,
        model=model,
        seed=options.seed,
        on_round=[write],
    )


class _Meter:
    """The mean loss of all replicas since the last line, a few hundred times in a run."""

    def __init__(
        self, options: RunOptions, task: Task, schedule: OneCycleLR, ensemble: Ensemble | None, files: RunFolder | None
    ) -> None:
        self.last = float("nan")
        self._spread = options.spread if options.fans_out else 0.0
        self._schedule, self._ensemble, self._files = schedule, ensemble, files
        self._replicas = find_replicas()
        self._steps = task.steps
        self._every = max(1, task.steps // _LINES_PER_RUN)
        self._losses: list[Tensor] = []
        self._rate = self._center()  # of the step under way
        peak = max(group["max_lr"] for group in schedule.optimizer.param_groups)
        method = options.controller if options.fans_out else "plain"
        title = f"{options.task}, {method}, peak {peak:.1e}, seed {options.seed}"
        self._progress = Progress(title, task.steps, files is not None)

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
            low, high = self._rate * (1 - self._spread), self._rate * (1 + self._spread)
            self._progress.show(step, self.last, f"{low:.1e}..{high:.1e}" if low < high else f"{low:.1e}")

    def _center(self) -> float:
        """The first parameter group's learning rate: the schedule, and what a controller has made of it."""
        scale = 1.0 if self._ensemble is None else next(iter(self._ensemble.scales.values()))
        return float(self._schedule.get_last_lr()[0]) * scale


def device() -> torch.device:
    """This process's GPU, where there are any."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


if __name__ == "__main__":
    from hdet.lab.worker import main

    sys.exit(main())
