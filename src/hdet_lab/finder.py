"""`hdet find-lr`: finds the learning rate of a task before training; runs on every replica."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hdet import FindLRError, FoundRate, data_parallel, find_lr, find_replicas
from hdet._report.search import commands_after
from hdet.records.json_lines import strict
from hdet_lab.ensemble_from_options import device, make_probe
from hdet_lab.errors import NoRateError, writing
from hdet_lab.folder import RunFolder
from hdet_lab.options import RunOptions
from hdet_lab.status_line import StatusLine
from hdet_lab.summary import what_next
from hdet_lab.tables import table
from hdet_lab.tasks import Task

_SHOWN_EVERY = 10  # steps


def find_rate(options: RunOptions, folder: str | Path) -> dict[str, Any]:
    """Find the rate. Collective; the first replica writes `folder`, and all return the content of find_lr.json.

    Raises:
        NoRateError: if the loss does not fall at any rate.
    """
    replicas = find_replicas()
    files = RunFolder(folder) if replicas.rank == 0 else None
    if files is not None:
        files.begin(options)
    task = options.make_task()
    peak_lr = options.peak_lr_of(task)
    model = data_parallel(task.model().to(device()))
    found = find(options, task, model, task.optimizer(model, peak_lr, options.optimizer))
    result = result_of(options, task, peak_lr, found)
    if files is not None:
        write(result, found, files)
    return result


def find(options: RunOptions, task: Task, model: nn.Module, optimizer: Optimizer, outer_step: float = 1.0) -> FoundRate:
    """Find the rate for `model`. The ramps train on the run's batches, from the first one on.

    Raises:
        NoRateError: if the loss does not fall at any rate.
    """
    replicas = find_replicas()
    line = StatusLine(f"{options.task}, find-lr, seed {options.seed}", None, replicas.rank == 0)
    taken = itertools.count(1)

    def step(index: int) -> None:
        batch = task.batch(index % task.steps, replicas.rank, replicas.size)
        loss = task.loss(model, batch, options.label_smoothing)
        loss.backward()  # type: ignore[no-untyped-call]
        line.step()
        if (count := next(taken)) % _SHOWN_EVERY == 0:
            line.show(count, loss.item(), f"{float(optimizer.param_groups[0]['lr']):.1e}")

    try:
        probe = make_probe(options, task)
        return find_lr(model, optimizer, step, probe=probe, total_steps=task.steps, outer_step=outer_step)
    except FindLRError as error:
        raise NoRateError(str(error)) from error
    finally:
        line.close()


def show(result: dict[str, Any], folder: Path) -> str:
    """The result as a table, the doubts, the path of the picture, and the next commands."""
    (low, high), (lower, _) = result["interval"], result["whole"]
    rows = [
        ["learning rate", f"{result['rate']:.3g}"],
        ["losses were low", f"{low:.3g} .. {high:.3g}"],
        *([["narrow, so counted as", f"{lower:.3g} .. {high:.3g}"]] if lower < low else []),
        ["start", f"{result['peak_lr']:.3g}"],
        ["steps", str(result["steps"])],
        ["cost in steps", f"{result['cost']:.0f}"],
        ["seconds", f"{result['seconds']:.1f}"],
    ]
    picture = folder / "find_lr.png"
    drawn = f"Picture: {picture}" if picture.exists() else "No picture: it needs matplotlib, pip install 'hdet[lab]'"
    following = what_next([folder], commands_after(result))
    unsure = "".join(f"Not sure: {doubt}\n" for doubt in result["doubts"])
    return f"{table(['found', ''], rows)}\n\n{unsure}{drawn}\nEverything is in {folder}\n{following}"


def result_of(options: RunOptions, task: Task, peak_lr: float, found: FoundRate) -> dict[str, Any]:
    """The content of find_lr.json for a search that started at `peak_lr`."""
    copied = {name: getattr(options, name) for name in ("task", "size", "seed", "replicas", "optimizer")}
    result: dict[str, Any] = strict(
        {**copied, "peak_lr": peak_lr, **strict(found), "total_steps": task.steps, "sure": found.sure}
    )
    return result


def write(result: dict[str, Any], found: FoundRate, files: RunFolder) -> None:
    """Write find_lr.json, and draw find_lr.png."""
    _draw(found, files.path / "find_lr.png")
    files.write("find_lr.json", result)


def _draw(found: FoundRate, picture: Path) -> None:
    with contextlib.suppress(ModuleNotFoundError), writing(picture):  # the numbers are in find_lr.json
        found.plot(picture)
