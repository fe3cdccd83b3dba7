"""`hdet sweep`: how the held-out loss depends on the peak learning rate.

The rates form a geometric grid, which widens until the best one is inside.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hdet_lab.errors import OptionError
from hdet_lab.many_runs import held_out_loss, mean, open_experiment, over_seeds, run_all, what_is_held_out
from hdet_lab.options import RunOptions
from hdet_lab.tables import number, table
from hdet_lab.worker import Job

RATIO, MOST_RATES = 2.0, 15
_FIRST = 2  # rates on either side of the middle at first
_MORE = 2  # rates to add if the best one is at an edge


def sweep(
    options: RunOptions,
    folder: Path,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    ratio: float = RATIO,
    most_rates: int = MOST_RATES,
    one_process: Callable[[int], bool] = lambda size: False,
) -> dict[str, Any]:
    """Train at every rate with every seed; return the content of sweep.json. A second call continues a stopped one.

    Losses are on all held-out samples or, with a held-out probe, on the unseen half.

    Args:
        options: the run to repeat; its peak rate, or its task's, is the middle of the first grid.
        folder: output folder; one subfolder per run.
        seeds: the same for every rate.
        ratio: ratio of neighbouring rates, more than 1 and at most 2.
        most_rates: number of rates at which to stop widening.
        one_process: whether that many replicas run in one process.

    Raises:
        LabError: for options or a folder that cannot work.
    """
    _check(ratio, most_rates)
    task = options.make_task()
    middle = task.peak_lr if options.peak_lr is None else options.peak_lr
    about = {"options": options.to_json(), "seeds": list(seeds), "ratio": ratio}
    files = open_experiment(folder, "sweep.json", about)

    def measure(exponents: list[int]) -> dict[int, list[float]]:
        jobs = [_job(options, folder, _rate(middle, ratio, k), seed) for k in exponents for seed in seeds]
        found = [held_out_loss(result, options.probes_held_out) for result in run_all(jobs, one_process)]
        return {k: found[i * len(seeds) : (i + 1) * len(seeds)] for i, k in enumerate(exponents)}

    losses, best = _widen(measure, most_rates)
    rates = [_summary(_rate(middle, ratio, k), losses[k]) for k in sorted(losses)]
    inside = min(losses) < best < max(losses)
    result = {**about, "best_peak_lr": _rate(middle, ratio, best), "inside": inside, "rates": rates}
    files.write("sweep.json", result)
    return result


def show(result: dict[str, Any]) -> str:
    """The table and its conclusion."""
    rows, seeds = [], len(result["seeds"])
    for row in result["rates"]:
        best = "  <- best" if row["peak_lr"] == result["best_peak_lr"] else ""
        cells = [number(row[key]) for key in ("mean", "sd", "min", "max")]
        cells[1] = "-" if seeds == 1 else cells[1]
        rows.append([f"{row['peak_lr']:.3g}", *cells[:-1], cells[-1] + best])
    width = max(len(row[-1]) for row in rows)
    rows = [[*row[:-1], row[-1].ljust(width)] for row in rows]
    text = table(["peak lr", "held-out loss", "sd", "min", "max".ljust(width)], rows)
    said = "The best rate lies inside the grid."
    if not result["inside"]:
        said = "The best rate is at the edge of the grid: it was not found. Widen it with --most-rates or --peak-lr."
    return f"{text}\n\n{over_seeds(seeds).capitalize()}. {said}\n{what_is_held_out(result)}"


def _widen(
    measure: Callable[[list[int]], dict[int, list[float]]], most_rates: int
) -> tuple[dict[int, list[float]], int]:
    """The losses by exponent of the ratio, and the best exponent: inside, or at an edge if the grid cannot widen."""
    new = list(range(-_FIRST, _FIRST + 1))
    losses: dict[int, list[float]] = {}
    while True:
        losses |= measure(new)
        best = min(sorted(losses), key=lambda k: mean(losses[k]))
        low, high, more = min(losses), max(losses), min(_MORE, most_rates - len(losses))
        if low < best < high or more <= 0:
            return losses, best
        new = list(range(low - more, low)) if best == low else list(range(high + 1, high + more + 1))


def _check(ratio: float, most_rates: int) -> None:
    if not 1 < ratio <= 2:
        raise OptionError(f"ratio must be more than 1 and at most 2, got {ratio}")
    if most_rates < 2 * _FIRST + 1:
        raise OptionError(f"most_rates must be at least {2 * _FIRST + 1}, got {most_rates}")


def _job(options: RunOptions, folder: Path, rate: float, seed: int) -> Job:
    return Job(options.replace(peak_lr=rate, seed=seed), str(folder / f"lr-{rate:.6g}-seed-{seed}"))


def _rate(middle: float, ratio: float, k: int) -> float:
    return float(f"{middle * ratio**k:.6g}")


def _summary(rate: float, losses: list[float]) -> dict[str, Any]:
    finite = all(math.isfinite(loss) for loss in losses)
    center = mean(losses)
    sd = None if len(losses) < 2 else statistics.stdev(losses) if finite else math.inf
    return {"peak_lr": rate, "losses": losses, "mean": center, "sd": sd, "min": min(losses), "max": max(losses)}
