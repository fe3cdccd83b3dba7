"""One run, as every replica lives it: under torchrun, under `hdet` and under `hdet.in_process` alike.

torchrun --standalone --nproc-per-node 2 -m hdet.lab.train text --peak-lr 1e-3
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hdet import Auto, Ensemble, FoundRate, RoundRecord, data_parallel, find_replicas, load, save, warm_init
from hdet.lab.finder import find
from hdet.lab.folder import RunFolder, load_weights, plain
from hdet.lab.meter import HeldOutCurve, Meter
from hdet.lab.options import RunOptions
from hdet.lab.recipe import ONE_CYCLE, Recipe
from hdet.lab.setup import charged_steps, device, make_ensemble, make_smoothing
from hdet.lab.tasks import Task, bare


def train(options: RunOptions, folder: str | Path, recipe: Recipe = ONE_CYCLE) -> dict[str, Any]:
    """Train once, collectively; the first replica writes `folder`. What is in result.json, on every replica.

    A `recipe` trains with another optimizer or schedule. A run with checkpoints in `folder` goes on from the last one.

    The losses on the held-out data are those of the average of the replicas, and known to the first one only:
    `held_out` of all samples, `held_out_unseen` of the half that no held-out probe draws from. The first is the
    result of a run without such a probe, the second of a run with one and of those that are compared with it.

    `scales` are the factors that the controller has put on the schedules at step `scales_step`, the end of the last
    round before the learning rate falls below half of its peak. Later, with the rate on its way to zero, no scale
    changes the loss much, and what a controller makes of it says little: rounds.jsonl has the whole course.
    """
    replicas = find_replicas()
    first = replicas.rank == 0
    files = _begin(options, folder) if first else None
    task = options.make_task()
    peak_lr = task.peak_lr if options.peak_lr is None else options.peak_lr
    model = _model(options, task)
    optimizer = recipe.optimizer(options, task, model, peak_lr)
    smoothing = make_smoothing(options)

    started = time.perf_counter()
    found = _find(options, task, model, optimizer)
    if found is not None:
        peak_lr = found.rate
    if options.warm_noise:
        warm_init(model, options.warm_noise, seed=options.seed)
    steps = charged_steps(options, task, found) if options.charge else task.steps
    schedule = recipe.schedule(optimizer, peak_lr, steps)
    scales = _Scales(optimizer, peak_lr)
    sinks: list[Callable[[RoundRecord], None]] = [scales] if files is None else [scales, files.record]
    ensemble = make_ensemble(options, task, steps, model, optimizer, smoothing, sinks)
    run = {"model": model, "optimizer": optimizer, "schedule": schedule}
    run |= {} if ensemble is None else {"ensemble": ensemble}
    checkpoints = Path(folder) / "checkpoints"
    first_step = _resume(checkpoints, run, files) if options.checkpoint_every else 0
    meter = Meter(options, peak_lr, steps, schedule, ensemble, files)
    curve = HeldOutCurve(options.evaluate_every, started, task, model, optimizer, recipe, ensemble, files)
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
        curve.step(step + 1)
        if options.checkpoint_every and (step + 1) % options.checkpoint_every == 0:
            save(checkpoints, run, step=step + 1)
    seconds = time.perf_counter() - started - curve.seconds
    meter.close()
    if ensemble is not None:
        scales.end(ensemble, steps)
        ensemble.close()
    measured = {
        "seconds": round(seconds, 3),
        "train_loss": meter.last,
        "scales": scales.found,
        "scales_step": scales.step,
        **_held_out(recipe, task, model, optimizer, first),
    }
    cost = {} if found is None else {"finder_steps": found.steps, "finder_cost": found.cost}
    result: dict[str, Any] = plain({**_settings(options, task, steps, peak_lr), **cost, **measured})
    if files is not None:
        files.write_weights(bare(model))
        files.write("result.json", result)
    return result


def _begin(options: RunOptions, folder: str | Path) -> RunFolder:
    files = RunFolder(folder)
    files.begin(options)
    return files


def _model(options: RunOptions, task: Task) -> nn.Module:
    model = data_parallel(task.model().to(device()))
    if options.start is not None:
        load_weights(options.start, bare(model))
    return model


def _held_out(
    recipe: Recipe, task: Task, model: nn.Module, optimizer: Optimizer, first: bool
) -> dict[str, dict[str, float] | None]:
    """The losses on the held-out samples, on the first replica."""
    with recipe.evaluating(task, model, optimizer):
        return {
            "held_out": task.evaluate(model) if first else None,
            "held_out_unseen": task.evaluate(model, unseen=True) if first else None,
        }


def _resume(checkpoints: Path, run: dict[str, Any], files: RunFolder | None) -> int:
    """Go on from the last checkpoint, if there is one; the step to begin with."""
    resumed = load(checkpoints, run)
    step = 0 if resumed is None else resumed.step
    if files is not None:
        for name in ("losses.jsonl", "rounds.jsonl", "held_out.jsonl"):
            files.rewind(name, step)
    return step


def _find(options: RunOptions, task: Task, model: nn.Module, optimizer: Optimizer) -> FoundRate | None:
    """The rate that `Auto` looks for before a long run; None in other runs."""
    if options.controller != "auto" or not Auto().plan(list(options.explored()), task.steps).finds:
        return None
    outer_step = Auto().outer_step if options.outer_step is None else options.outer_step
    return find(options, task, model, optimizer, outer_step)


def _settings(options: RunOptions, task: Task, steps: int, peak_lr: float) -> dict[str, Any]:
    """What a result is the result of."""
    copied = {name: getattr(options, name) for name in ("task", "size", "seed", "replicas", "optimizer", "controller")}
    about = {"steps": steps, "marginal_loss": task.marginal_loss, "held_out_probe": options.probes_held_out}
    return {**copied, "peak_lr": peak_lr, **about}


class _Scales:
    """Collects the scales of a run while they matter: `found` at `step`."""

    def __init__(self, optimizer: Optimizer, peak_lr: float) -> None:
        self.found: dict[str, float] = {}
        self.step = 0
        self._optimizer, self._peak_lr = optimizer, peak_lr

    def __call__(self, record: RoundRecord) -> None:
        if self._optimizer.param_groups[0]["lr"] >= self._peak_lr / 2:
            self._take({name: row.scale for name, row in record.hyperparameters.items()}, record.step)

    def end(self, ensemble: Ensemble, step: int) -> None:
        """After the last step of a run that had no round in that time."""
        if not self.found:
            self._take(dict(ensemble.scales), step)

    def _take(self, found: dict[str, float], step: int) -> None:
        self.found, self.step = found, step


if __name__ == "__main__":
    from hdet.lab.worker import main

    sys.exit(main())
