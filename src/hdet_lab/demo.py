"""`hdet demo`: learning rates ten times too low and too high, with and without hdet, against the best one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hdet._report.search import answer, find_search
from hdet_lab.errors import OptionError
from hdet_lab.folder import RunFolder, read_lines, require_empty
from hdet_lab.launch import launch
from hdet_lab.many_runs import run_all
from hdet_lab.options import RunOptions
from hdet_lab.summary import draw, what_next
from hdet_lab.tables import number, table
from hdet_lab.worker import Job

STEPS, REPLICAS, OFF = 600, 4, 10.0  # Auto searches before runs of more than 500 steps
_BEST = "OneCycleLR, best rate"


def demo(folder: Path, *, steps: int = STEPS, replicas: int = REPLICAS, one_process: bool = False) -> str:
    """Train five times and return the report. Writes `folder`, which must be new or empty."""
    if replicas < 2:
        raise OptionError(f"replicas must be 2 or more to fan out, got {replicas}; for example {REPLICAS}")
    require_empty(folder)
    options = RunOptions("text", steps=steps, replicas=replicas, controller="none")
    best = options.make_task().peak_lr
    starts = {"low": best / OFF, "high": best * OFF}
    RunFolder(folder)
    jobs = {
        f"{name} from too {where}": Job(
            options.replace(peak_lr=rate, controller=controller), str(folder / f"{kind}-{where}")
        )
        for name, kind, controller in (("OneCycleLR", "plain", "none"), ("HDET", "hdet", "auto"))
        for where, rate in starts.items()
    }
    jobs[_BEST] = Job(options.replace(peak_lr=best), str(folder / "plain-best"))
    print(_introduction(steps, replicas, best), flush=True)
    started = time.monotonic()
    launch(list(jobs.values()), one_process=one_process)
    results = dict(zip(jobs, run_all(list(jobs.values()), lambda size: one_process), strict=True))
    seconds = time.monotonic() - started
    folders = {name: Path(job.folder) for name, job in jobs.items()}
    drawn = draw(folders, folder)
    said = "\n".join(_verdict(where, rate, results, folders) for where, rate in starts.items())
    said += "\nOne seed: differences of a few hundredths mean little."
    shown = sorted(folders.values())
    return (
        f"\n{_table(results, jobs)}\n\n{said}\n\n{drawn}\nEverything is in {folder} ({seconds:.0f} s).\n"
        f"{what_next(shown)}"
    )


def _introduction(steps: int, replicas: int, best: float) -> str:
    return (
        f"A byte-level transformer on Python's standard library, {replicas} replicas, {steps} steps, five runs:\n"
        f"torch's OneCycleLR from a peak rate {OFF:.0f} times too low, {OFF:.0f} times too high, and at the best rate\n"
        f"that a sweep at 1,000 steps found ({best:.1e}); and HDET from the low and from the high one.\n"
    )


def _table(results: dict[str, dict[str, Any]], jobs: dict[str, Job]) -> str:
    rows = []
    for name, result in results.items():
        held_out = result["held_out"]
        losses = [number(held_out["loss"]), number(held_out.get("bits_per_byte"), 3)]
        rates = [f"{rate:.1e}" for rate in (jobs[name].options.peak_lr, result["peak_lr"])]
        rows.append([name, *rates, *losses, f"{result['seconds']:.1f}"])
    return table(["method", "start", "trained at", "held-out loss", "bits per byte", "seconds"], rows)


def _verdict(where: str, rate: float, results: dict[str, dict[str, Any]], folders: dict[str, Path]) -> str:
    """What HDET made of one start."""
    names = (f"OneCycleLR from too {where}", _BEST, f"HDET from too {where}")
    plain, best, hdet = (results[name]["held_out"]["loss"] for name in names)
    if best is None or hdet is None or (plain is not None and plain <= best):
        return f"From {rate:.1e}: no gap to the best rate in this run, which is too short to tell them apart."
    if plain is None:
        said = f"From {rate:.1e}: OneCycleLR diverged; HDET ended {100 * (hdet / best - 1):.1f} % behind the best rate."
    else:
        closed = min(max(0.0, 100 * (plain - hdet) / (plain - best)), 100.0)
        said = f"From {rate:.1e}: HDET closed {closed:.0f} % of the gap to the best rate."
    return f"{said} {search_cost(folders[names[2]], results[names[2]], rate)}"


def search_cost(folder: Path, result: dict[str, Any], start: float) -> str:
    """What a run with `auto` found, and what its seconds were spent on beside training."""
    if "finder_steps" in result:
        found = {
            "rate": result["peak_lr"],
            "cost": result["finder_cost"],
            "seconds": None,
            "start": start,
            "doubts": [],
        }
        told = find_search([], {**found, "peak_lr": start})
        return f"It found {answer(told)}" if told else ""
    probed = [record["step"] for record in read_lines(folder / "rounds.jsonl") if record.get("probe") is not None]
    often = "" if not probed or probed[0] == 1 else f"{probed[0]} "
    return f"Its seconds include probes after every {often}step{'s' if often else ''}."
