"""Is a charged run as long by the clock as the plain one? Both in turns, on the same machine.

    python benchmarks/clock.py                      # digits, flights and text at the standard size, three turns each
    python benchmarks/clock.py text --turns 1

`Auto` is charged for its search in steps: a forward pass counts as a third of one, and the run is shortened by that.
Here the seconds of its process, search included, are compared with those of plain OneCycleLR, and what the search says
that it cost (`FoundRate.cost`, by its own clock) with what it was charged. Rows go to benchmarks/results/clock.jsonl.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
from pathlib import Path

from quality_methods import one

RESULTS = Path(__file__).parent / "results" / "clock.jsonl"
RATES = {"digits": 2e-3, "flights": 8e-4, "text": 8e-3}  # about the best: both runs are healthy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(RATES)}; all without one")
    parser.add_argument("--size", default="standard")
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    if not set(arguments.tasks) <= set(RATES):
        parser.error(f"TASK must be of {', '.join(RATES)}, got {' '.join(arguments.tasks)}")
    context = multiprocessing.get_context("spawn")
    for task in arguments.tasks or RATES:
        ratios, costs = [], []
        for _ in range(arguments.turns):
            turn = {}
            for method in ("plain", "auto"):
                about = {"task": task, "size": arguments.size, "optimizer": "adamw", "method": method}
                with context.Pool(1) as pool:  # a process each, so that its seconds are its own
                    row = pool.apply(one, ({**about, "peak_lr": RATES[task], "seed": 0},))
                kept = {key: row[key] for key in ("cpu_seconds", "seconds", "steps", "finder_steps", "finder_cost")}
                turn[method] = kept
                with RESULTS.open("a") as file:
                    file.write(json.dumps(about | kept) + "\n")
            ratios.append(turn["auto"]["cpu_seconds"] / turn["plain"]["cpu_seconds"])
            charged = max(1, turn["plain"]["steps"] - turn["auto"]["steps"])
            costs.append(turn["auto"]["finder_cost"] / charged)
        shown = [f"{statistics.median(x):.2f} ({min(x):.2f} to {max(x):.2f})" for x in (ratios, costs)]
        print(f"{task}: Auto / plain, seconds of CPU: {shown[0]}; the search by its clock / as charged: {shown[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
