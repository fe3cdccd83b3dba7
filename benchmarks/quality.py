"""What each method makes of a wrong start: held-out loss against the best rate of a sweep, all compute charged.

    python benchmarks/starts.py sweep flights --size long --optimizer adamw      # the trusted sweep, plain OneCycleLR
    python benchmarks/starts.py starts flights --size long --method plain        # from 1/30 to 10 times its best rate
    python benchmarks/starts.py table                                            # everything that was run, as a table

Every run is one line of benchmarks/results/starts.jsonl; a second call runs what is missing there. With plain DDP and
no fan-out four replicas are one process with the global batch, up to rounding, and are run as that; a model with
BatchNorm (digits), and every method that fans out, is run with four replicas in one process.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "starts.jsonl"
STARTS = {"1/30": 1 / 30, "1/10": 1 / 10, "1/3": 1 / 3, "1": 1.0, "3": 3.0, "10": 10.0}
# Where the sweeps begin: nothing depends on it but the time until the best rate is inside.
FIRST = {
    ("digits", "adamw"): 8e-3, ("text", "adamw"): 4e-3, ("flights", "adamw"): 4e-4,
    ("digits", "sgd"): 0.128, ("text", "sgd"): 0.256, ("flights", "sgd"): 0.001,
}  # fmt: skip


def key(run: dict) -> tuple:
    return tuple(run[name] for name in ("task", "size", "optimizer", "method", "peak_lr", "seed"))


def known() -> dict[tuple, dict]:
    if not RESULTS.exists():
        return {}
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return {key(row): row for row in rows}


def one(run: dict) -> dict:
    """Train once in this process; the run with its held-out loss and its cost."""
    os.nice(5)
    import torch  # noqa: PLC0415

    import hdet  # noqa: PLC0415
    from hdet.lab.options import RunOptions  # noqa: PLC0415
    from hdet.lab.train import train  # noqa: PLC0415

    torch.set_num_threads(1)
    fans_out = run["method"] in ("paper", "line search") or run["size"] != "long"
    one_model = run["method"] == "plain" or not fans_out
    one_model = one_model and run["task"] != "digits"
    options = RunOptions(
        run["task"], size=run["size"], seed=run["seed"], optimizer=run["optimizer"], peak_lr=run["peak_lr"],
        replicas=1 if one_model else 4, **METHODS[run["method"]],
    )  # fmt: skip
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        results = hdet.in_process(train, options.replicas, options, Path(folder) / "run")
    held_out = results[0]["held_out"] or {}
    used = {name: results[0].get(name) for name in ("steps", "finder_steps", "finder_cost")}
    used["used_lr"] = results[0]["peak_lr"]
    return {**run, "held_out": held_out.get("loss"), **used, "seconds": round(time.time() - started, 1)}


METHODS = {
    "plain": {"controller": "none"},
    "paper": {"controller": "softmax", "temperature": 0.1},
    "auto": {"controller": "auto", "charge": True},
    "line search": {"controller": "line_search", "charge": True},
}


def run_all(runs: list[dict], workers: int) -> list[dict]:
    """The runs with their results, in order; each is written when it is done."""
    found = known()
    missing = [run for run in runs if key(run) not in found]
    with multiprocessing.get_context("spawn").Pool(min(workers, max(1, len(missing))), maxtasksperchild=1) as pool:
        for row in pool.imap_unordered(one, missing):
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(*row.values(), flush=True)
            found[key(row)] = row
    return [found[key(run)] for run in runs]


def loss(row: dict) -> float:
    return math.inf if row["held_out"] is None or not math.isfinite(row["held_out"]) else row["held_out"]


def sweep(about: dict, seeds: list[int], workers: int) -> dict[float, list[float]]:
    """The held-out losses of plain OneCycleLR by rate, the best one inside: ratio 2, the same seeds for every rate.

    A rate that is more than 2 % worse than the best with the first seed is not run with the others.
    """
    first = FIRST[about["task"], about["optimizer"]]
    losses: dict[int, list[float]] = {}

    def measure(exponents, seeds):
        rate = lambda k: float(f"{first * 2.0**k:.6g}")  # noqa: E731
        runs = [{**about, "method": "plain", "peak_lr": rate(k), "seed": seed} for k in exponents for seed in seeds]
        rows = run_all(runs, workers)
        for number, k in enumerate(exponents):
            part = rows[number * len(seeds) : (number + 1) * len(seeds)]
            losses[k] = losses.get(k, []) + [loss(row) for row in part]

    measure([-2, -1, 0, 1, 2], seeds[:1])
    while True:
        best = min(losses, key=lambda k: statistics.fmean(losses[k]))
        if best == min(losses):
            measure([best - 1], seeds[:1])
        elif best == max(losses):
            measure([best + 1], seeds[:1])
        else:
            limit = 1.02 * losses[best][0]
            again = [k for k in sorted(losses) if len(losses[k]) < len(seeds) and losses[k][0] < limit]
            if not again:
                break
            measure(again, seeds[1:])
    return {float(f"{first * 2.0**k:.6g}"): losses[k] for k in sorted(losses)}


def best_rate(about: dict, seeds: list[int], workers: int) -> tuple[float, float]:
    """The best rate of the sweep and its mean held-out loss."""
    losses = {rate: row for rate, row in sweep(about, seeds, workers).items() if len(row) == len(seeds)}
    rate = min(losses, key=lambda r: statistics.fmean(losses[r]))
    return rate, statistics.fmean(losses[rate])


def on_grid(row: dict) -> bool:
    """Whether its rate is one of the sweep's, and not a start."""
    exponent = math.log2(row["peak_lr"] / FIRST[row["task"], row["optimizer"]])
    return abs(exponent - round(exponent)) < 1e-3


def table() -> None:
    """Regret in % by task, method and start: the mean, the worst seed, and how many seeds there were."""
    rows = list(known().values())
    for about in sorted({(row["task"], row["size"], row["optimizer"]) for row in rows}):
        mine = [row for row in rows if (row["task"], row["size"], row["optimizer"]) == about]
        by_rate: dict[float, list[dict]] = {}
        for row in mine:
            if row["method"] == "plain" and on_grid(row):
                by_rate.setdefault(row["peak_lr"], []).append(row)
        most = max(map(len, by_rate.values()), default=0)
        trusted = {rate: [loss(row) for row in part] for rate, part in by_rate.items() if len(part) == most}
        rate = min(trusted, key=lambda r: statistics.fmean(trusted[r]))
        best = {row["seed"]: loss(row) for row in by_rate[rate]}
        center = statistics.fmean(best.values())
        print(f"\n### {', '.join(about)}: best {center:.4f} at {rate:.3g} ({most} seeds)\n")
        print("| method | " + " | ".join(STARTS) + " |\n|---|" + "---|" * len(STARTS))
        for method in dict.fromkeys(row["method"] for row in mine):
            cells = []
            for start in STARTS.values():
                wanted = float(f"{rate * start:.6g}")
                part = [row for row in mine if row["method"] == method and row["peak_lr"] == wanted]
                # against the same seeds at the best rate
                regrets = [100 * (loss(row) / best.get(row["seed"], center) - 1) for row in part]
                cells.append(f"{statistics.fmean(regrets):.1f} ({max(regrets):.1f}; {len(part)})" if part else "")
            print(f"| {method} | " + " | ".join(cells) + " |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sweep", "starts", "table"))
    parser.add_argument("task", nargs="?")
    parser.add_argument("--size", default="long")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--method", default="plain")
    parser.add_argument("--starts", default=",".join(STARTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.what == "table":
        table()
        return 0
    about = {"task": arguments.task, "size": arguments.size, "optimizer": arguments.optimizer}
    seeds = list(range(arguments.seeds))
    if arguments.what == "sweep":
        for rate, row in sweep(about, seeds, arguments.workers).items():
            print(f"{rate:.3g}", f"{statistics.fmean(row):.4f}", [round(value, 4) for value in row])
        return 0
    rate, best = best_rate(about, seeds, arguments.workers)
    names = arguments.starts.split(",")
    runs = [
        {**about, "method": arguments.method, "peak_lr": float(f"{rate * STARTS[name]:.6g}"), "seed": seed}
        for name in names
        for seed in seeds
    ]
    rows = run_all(runs, arguments.workers)
    print(f"best of the sweep: {best:.4f} at {rate:.3g}")
    for number, name in enumerate(names):
        part = [100 * (loss(row) / best - 1) for row in rows[number * len(seeds) : (number + 1) * len(seeds)]]
        print(f"{arguments.method} from {name}: regret {statistics.fmean(part):.1f} %", [round(x, 1) for x in part])
    return 0


if __name__ == "__main__":
    sys.exit(main())
