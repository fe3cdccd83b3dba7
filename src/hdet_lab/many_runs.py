"""Many runs: reads finished ones from their folders and trains the others."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hdet_lab.errors import FolderError, NoRateError, ReplicaFailedError
from hdet_lab.folder import RESULT, RunFolder, read, read_options, require_empty
from hdet_lab.launch import launch
from hdet_lab.options import RunOptions
from hdet_lab.worker import Job

_RESULT = "result.json"
_DIVERGED = "the run has diverged"  # what an Ensemble says then


def run_all(jobs: Sequence[Job], one_process: Callable[[int], bool]) -> list[dict[str, Any]]:
    """The results of all jobs, in order.

    Args:
        jobs: the runs; those with equal numbers of replicas share one launch.
        one_process: whether that many replicas go into one process.

    Raises:
        FolderError: if a folder holds a run with other options.
    """
    pending = [job for job in jobs if _result(job) is None]
    for size in dict.fromkeys(job.options.replicas for job in pending):
        launch([job for job in pending if job.options.replicas == size], one_process=one_process(size))
    return [_result(job) or {} for job in jobs]


def run_all_to_the_end(jobs: Sequence[Job], one_process: Callable[[int], bool]) -> list[dict[str, Any]]:
    """Like `run_all()`, but continue if hdet ends a run that has diverged or has no initial rate: its result has no
    loss and says why, as `diverged` or `no_rate`.

    Raises:
        FolderError: if a folder holds a run with other options.
    """
    while True:
        started = time.monotonic()
        try:
            return run_all(jobs, one_process)
        except (ReplicaFailedError, NoRateError) as error:
            folders = [Path(job.folder) for job in jobs]
            stopped = [path for path in folders if (path / "options.json").exists() and read(path / _RESULT) is None]
            why = next((line for line in str(error).splitlines() if _DIVERGED in line), None)
            said = {"no_rate": str(error)} if isinstance(error, NoRateError) else {"diverged": why}
            if None in said.values() or len(stopped) != 1:
                raise
            lost = {"held_out": None, "held_out_unseen": None, "train_loss": None, **said}
            RunFolder(stopped[0]).write(_RESULT, {**lost, "seconds": round(time.monotonic() - started, 3)})


def _result(job: Job) -> dict[str, Any] | None:
    """The result of a finished run; removes the remains of an interrupted one."""
    options = read_options(Path(job.folder))
    if options is None:
        return None
    if options != job.options:
        raise FolderError(f"{job.folder} holds a run with other options; choose another folder with --folder")
    result: dict[str, Any] | None = read(Path(job.folder) / _RESULT, RESULT)
    if result is None:
        shutil.rmtree(job.folder)
    return result


def open_experiment(folder: Path, name: str, about: dict[str, Any]) -> RunFolder:
    """Start or continue several runs in one folder; `name` names the kind of experiment.

    Raises:
        FolderError: if the folder holds something else.
    """
    before = read(folder / name)
    if before is None:
        require_empty(folder)
        files = RunFolder(folder)
        files.write(name, about)
        return files
    if any(before.get(key) != value for key, value in about.items()):
        raise FolderError(f"{folder} holds runs with other options; choose another folder with --folder")
    return RunFolder(folder)


def held_out_loss(result: dict[str, Any], unseen: bool) -> float:
    """The loss on all held-out samples, or on those that no held-out probe draws from; infinite if the run diverged.

    Raises:
        FolderError: if the run comes from a version without that loss.
    """
    name = "held_out_unseen" if unseen else "held_out"
    if name not in result:
        raise FolderError(f"a run has no {name}, it is another version's; choose another folder with --folder")
    loss = (result[name] or {}).get("loss")
    return math.inf if loss is None else float(loss)


def mean(values: Sequence[float]) -> float:
    """The mean; infinite if one value is."""
    return sum(values) / len(values)


def over_seeds(count: int) -> str:
    """The number of seeds behind a loss, in words.

    >>> over_seeds(3)
    'mean over 3 seeds'
    """
    return f"mean over {count} seeds" if count > 1 else "one seed, so small differences mean nothing"


def what_is_held_out(result: dict[str, Any]) -> str:
    """The samples behind the losses of several runs, in words."""
    if RunOptions.from_json(result["options"]).probes_held_out:
        return "Held-out loss: of the half of the samples that no probe has seen."
    return "Held-out loss: of all samples."
