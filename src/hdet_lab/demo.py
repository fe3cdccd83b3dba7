"""`hdet demo`: a learning rate ten times too low, with and without hdet, against the best one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hdet_lab.errors import OptionError
from hdet_lab.folder import RunFolder, read_lines, require_empty
from hdet_lab.launch import launch
from hdet_lab.many_runs import run_all
from hdet_lab.options import RunOptions
from hdet_lab.summary import draw, what_next
from hdet_lab.tables import number, table
from hdet_lab.worker import Job

STEPS, REPLICAS, TOO_LOW = 400, 4, 10.0


def demo(folder: Path, *, steps: int = STEPS, replicas: int = REPLICAS, one_process: bool = False) -> str:
    """Train three times and return the report. Writes `folder`, which must be new or empty."""
    if replicas < 2:
        raise OptionError(f"replicas must be 2 or more to fan out, got {replicas}; for example {REPLICAS}")
    require_empty(folder)
    options = RunOptions("text", steps=steps, replicas=replicas, controller="none")
    best = options.make_task().peak_lr
    low = best / TOO_LOW
    RunFolder(folder)
    jobs = {
        "OneCycleLR": Job(options.replace(peak_lr=low), str(folder / "plain-low")),
        "OneCycleLR, best rate": Job(options.replace(peak_lr=best), str(folder / "plain-best")),
        "HDET": Job(options.replace(peak_lr=low, controller="auto"), str(folder / "hdet-low")),
    }
    print(_introduction(steps, replicas, low, best), flush=True)
    started = time.monotonic()
    launch(list(jobs.values()), one_process=one_process)
    results = dict(zip(jobs, run_all(list(jobs.values()), lambda size: one_process), strict=True))
    seconds = time.monotonic() - started
    drawn = draw({name: Path(job.folder) for name, job in jobs.items()}, folder)
    said = f"\n{_table(results)}\n\n{_verdict(results, jobs)}\n\n{drawn}\nEverything is in {folder} ({seconds:.0f} s)."
    return f"{said}\n{what_next([Path(job.folder) for job in reversed(jobs.values())])}"


def _introduction(steps: int, replicas: int, low: float, best: float) -> str:
    return (
        f"A byte-level transformer on Python's standard library, {replicas} replicas, {steps} steps, three runs:\n"
        f"torch's OneCycleLR from a peak learning rate {TOO_LOW:.0f} times too low ({low:.1e}); the same at the best\n"
        f"rate that a sweep at 1,000 steps found ({best:.1e}); and HDET from the low one.\n"
    )


def _table(results: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, result in results.items():
        held_out = result["held_out"]
        losses = [number(held_out["loss"]), number(held_out.get("bits_per_byte"), 3)]
        rows.append([name, f"{result['peak_lr']:.1e}", *losses, str(result["steps"]), f"{result['seconds']:.1f}"])
    return table(["method", "start", "held-out loss", "bits per byte", "steps", "seconds"], rows)


def _verdict(results: dict[str, dict[str, Any]], jobs: dict[str, Job]) -> str:
    low, best, hdet = (results[name]["held_out"]["loss"] for name in results)
    if None in (low, best, hdet) or low <= best:
        return "No gap between the low and the best rate in this run: it is too short to tell them apart."
    closed = 100 * (low - hdet) / (low - best)
    said = f"HDET closed {closed:.0f}% of the gap that the low start leaves."
    if closed < 0:
        said = f"HDET closed nothing of the gap that the low start leaves, and ended {hdet - low:.4f} above it."
    cost = search_cost(Path(jobs["HDET"].folder), results["HDET"])
    return f"{said}\nOne seed: differences of a few hundredths mean little. {cost}"


def search_cost(folder: Path, result: dict[str, Any]) -> str:
    """What the seconds of a run with `auto` were spent on beside training, from its records."""
    probed = [record["step"] for record in read_lines(folder / "rounds.jsonl") if record.get("probe") is not None]
    if not probed:
        return (
            f"HDET's seconds include {result['finder_steps']} steps\nin which it looked for the rate; they were undone."
        )
    often = "step" if probed[0] == 1 else f"{probed[0]} steps"
    return (
        "HDET's seconds include its probes, in which\nevery replica scores its weights on the same batches after "
        f"every {often}: what not knowing the rate costs."
    )
