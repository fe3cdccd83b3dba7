"""One run on one replica: the same under torchrun, `hdet` and `hdet.in_process`.

torchrun --standalone --nproc-per-node 2 -m hdet_lab.train text --peak-lr 1e-3
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hdet import LostReplicaError, data_parallel, find_replicas, load, save, warm_init
from hdet.records import RoundRecord
from hdet.records.json_lines import strict
from hdet_lab.ensemble_from_options import device, make_ensemble, make_smoothing
from hdet_lab.errors import FolderError
from hdet_lab.folder import RunFolder, load_weights
from hdet_lab.options import RunOptions
from hdet_lab.recipe import ONE_CYCLE, Recipe
from hdet_lab.run_log import Clock, HeldOutCurve, Meter, Scales
from hdet_lab.run_start import RunStart, resolve_start
from hdet_lab.tasks import Task, bare


def train(options: RunOptions, folder: str | Path, recipe: Recipe = ONE_CYCLE) -> dict[str, Any]:
    """Train once. Collective; the first replica writes `folder`, and all return the content of result.json.

    A `recipe` trains with another optimizer or schedule. A run with checkpoints in `folder` resumes from the last one.

    The held-out losses are those of the replicas' average (of the first replica if nothing averages them: a warm
    initialisation without fan-out), and only the first replica has them: `held_out` on all samples, `held_out_unseen`
    on the half that no held-out probe draws from. The first is the result of a run without such a probe, the second
    that of a run with one and of runs compared with it.

    `scales` are the controller's factors on the schedules at step `scales_step`, the end of the last round before the
    learning rate falls below half of its peak. Later no scale changes the loss much, because the rate approaches zero,
    so the scales say little: rounds.jsonl has them all.

    A resumed run lists the steps (`resumed_at`). All results cover the whole run; `seconds` counts the time up to the
    checkpoint and since then, without work that was lost and repeated.
    """
    replicas = find_replicas()
    first = replicas.rank == 0
    files = _begin(options, folder) if first else None
    task = options.make_task()
    peak_lr = options.peak_lr_of(task)
    model = _model(options, task)
    optimizer = recipe.optimizer(options, task, model, peak_lr)
    smoothing = make_smoothing(options)

    start = resolve_start(options, task, model, optimizer, peak_lr, files)
    if options.warm_noise:
        warm_init(model, options.warm_noise, seed=options.seed)
    steps = start.steps
    if steps < task.steps:  # because of what was charged
        task = options.replace(steps=steps).make_task()
    clock = Clock(start.seconds)
    schedule = recipe.schedule(optimizer, start.peak_lr, steps)
    scales = Scales(optimizer, start.peak_lr)
    sinks: list[Callable[[RoundRecord], None]] = [scales] if files is None else [scales, files.record]
    ensemble = make_ensemble(options, task, steps, start.finder_steps > 0, model, optimizer, smoothing, sinks)
    meter = Meter(options, start.peak_lr, steps, schedule, ensemble, files)
    curve = HeldOutCurve(options.evaluate_every, clock, task, model, optimizer, recipe, ensemble, files)
    run: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, "resumed_at": []}
    run |= {"clock": clock, "scales": scales, "meter": meter}
    run |= {} if ensemble is None else {"ensemble": ensemble}
    checkpoints = Path(folder) / "checkpoints"
    first_step = _resume(checkpoints, run, meter, files) if options.checkpoint_every else 0
    for step in range(first_step, steps):
        batch = task.batch(step, replicas.rank, replicas.size)
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
            save(checkpoints, run, own={"losses": meter.losses}, step=step + 1)
    seconds = clock.seconds
    meter.close()
    if ensemble is not None:
        scales.end(ensemble, steps)
        ensemble.close()
    measured = {
        "seconds": round(seconds, 3),
        "resumed_at": run["resumed_at"],
        "train_loss": meter.last,
        "scales": scales.found,
        "scales_step": scales.step,
        **_held_out(recipe, task, model, optimizer, first),
    }
    result: dict[str, Any] = strict({**_settings(options, task, start), **measured})
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


def _resume(checkpoints: Path, run: dict[str, Any], meter: Meter, files: RunFolder | None) -> int:
    """Resume from the last checkpoint, if there is one; return the step to start at."""
    try:
        resumed = load(checkpoints, run, own={"losses": []})
    except LostReplicaError:
        raise
    except (RuntimeError, ValueError) as error:
        raise FolderError(str(error)) from error
    step = 0
    if resumed is not None:
        step = resumed.step
        run["resumed_at"] = [*resumed.values["resumed_at"], step]
        meter.start_from(step, resumed.values.get("losses", []))  # those of another number of replicas are left out
    if files is not None:
        for name in ("losses.jsonl", "rounds.jsonl", "held_out.jsonl"):
            files.rewind(name, step)
    return step


def _settings(options: RunOptions, task: Task, start: RunStart) -> dict[str, Any]:
    """The settings behind a result."""
    copied = {name: getattr(options, name) for name in ("task", "size", "seed", "replicas", "optimizer", "controller")}
    about = {"steps": start.steps, "marginal_loss": task.marginal_loss, "held_out_probe": options.probes_held_out}
    cost = {"finder_steps": start.finder_steps, "finder_cost": start.finder_cost} if start.finder_steps else {}
    return {**copied, "peak_lr": start.peak_lr, **about, **cost}


if __name__ == "__main__":
    from hdet_lab.worker import main

    sys.exit(main())
