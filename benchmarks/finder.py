"""How much the rate that find_lr answers depends on the rate that it begins from, and what it costs.

    python benchmarks/finder.py run          # what is missing of results/finder.jsonl: some minutes of one core
    python benchmarks/finder.py run --all    # from six starts in place of three
    python benchmarks/finder.py table        # standard deviations of its logarithm, costs, and how wide valleys are

Every search is one line. The starts are multiples of the best rate of a sweep at the long size (`quality.py sweep`);
cost is in training steps, a forward pass being a third of one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "finder.jsonl"
STARTS = {"1/30": 1 / 30, "1/10": 1 / 10, "1/3": 1 / 3, "1": 1.0, "3": 3.0, "10": 10.0}
BEST = {
    ("flights", "adamw"): 1e-4, ("flights", "sgd"): 5e-4, ("text", "adamw"): 4e-3, ("text", "sgd"): 0.256,
    ("digits", "adamw"): 8e-3, ("digits", "sgd"): 0.128,
}  # fmt: skip
SEEDS = (0, 1, 2)
FAR = ("1/30", "1", "10")


def known() -> list[dict]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def search(task: str, optimizer: str, seed: int, start: float) -> dict:
    """One search, in this process."""
    import hdet  # noqa: PLC0415
    from hdet_lab.finder import find  # noqa: PLC0415
    from hdet_lab.options import RunOptions  # noqa: PLC0415

    options = RunOptions(
        task, size="long", seed=seed, optimizer=optimizer, peak_lr=start, replicas=1, controller="auto"
    )
    made = options.make_task()

    def work() -> hdet.FoundRate:
        model = hdet.data_parallel(made.model())
        return find(options, made, model, made.optimizer(model, start, optimizer))

    found = hdet.in_process(work, 1)[0]
    cost = round(found.steps + found.samples / 3 / made.global_batch)
    return {"rate": found.rate, "interval": list(found.interval), "cost": cost}


def run(starts: tuple[str, ...]) -> None:
    """Every search that has no line yet."""
    done = {tuple(row[key] for key in ("task", "optimizer", "seed", "start")) for row in known()}
    for ((task, optimizer), best), seed, start in itertools.product(BEST.items(), SEEDS, starts):
        if (task, optimizer, seed, start) in done:
            continue
        about = {"task": task, "optimizer": optimizer, "seed": seed, "start": start}
        row = about | search(task, optimizer, seed, float(f"{best * STARTS[start]:.6g}"))
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")


def spread(rows: list[dict]) -> float:
    return statistics.stdev(math.log(row["rate"]) for row in rows)


def table() -> None:
    """By task and optimizer: the standard deviation for each seed, over three and over all starts, and the costs; and
    the intervals, as hi / lo and in multiples of the best rate.
    """
    print("| | 1/30, 1 and 10, by seed | six starts, by seed | cost | hi / lo | sqrt(lo hi) | hi | rate |")
    print("|---|---|---|---|---|---|---|---|")
    for (task, optimizer), best in BEST.items():
        mine = [row for row in known() if (row["task"], row["optimizer"]) == (task, optimizer)]
        by_seed = [[row for row in mine if row["seed"] == seed] for seed in SEEDS]
        three = [[row for row in rows if row["start"] in FAR] for rows in by_seed]
        if any(len(rows) < len(FAR) for rows in three):
            continue
        costs = [row["cost"] for row in mine]
        six = by_seed if all(len(rows) == len(STARTS) for rows in by_seed) else []
        cells = [" ".join(f"{spread(rows):.2f}" for rows in each) for each in (three, six)]
        cells.append(f"{min(costs)} to {max(costs)}")
        ends = [row["interval"] for row in mine]
        cells.append(_range([high / low for low, high in ends]))
        cells.append(_range([math.sqrt(low * high) / best for low, high in ends]))
        cells.append(_range([high / best for _, high in ends]))
        cells.append(_range([row["rate"] / best for row in mine]))
        print(f"| {task}, {optimizer} | " + " | ".join(cells) + " |")


def _range(values: list[float]) -> str:
    return f"{min(values):.2g} to {max(values):.2g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--all", action="store_true", help="run: from all starts")
    arguments = parser.parse_args()
    if arguments.what == "table":
        table()
    else:
        run(tuple(STARTS) if arguments.all else FAR)
    return 0


if __name__ == "__main__":
    sys.exit(main())
