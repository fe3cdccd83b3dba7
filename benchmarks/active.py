"""How long `Auto`'s line search should act in a run of 1,000 steps, and whether finding the rate first is better there.

    python benchmarks/active.py digits 6.66667e-05,0.002,0.02 --seeds 2    # what is missing of results/active.jsonl
    python benchmarks/active.py text 0.000333,0.01,0.1

Every run is one line: a part of the run in which the line search acts, or a kind of search before it: as released, as
slow as for a long run, faster. All compute is charged. The rows that are there are of 2026-11-16: an outer step of 1/2
after the search, whose fine ramp alone depended on the length of the run (growth 0.04 for 1,000 steps; faster: 0.08).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from pathlib import Path

from quality_methods import one

RESULTS = Path(__file__).parent / "results" / "active.jsonl"
SEARCHES = {"find_lr, slow": None, "find_lr": 1000, "find_lr, fast": 125}  # for a run of how many steps
PARTS = (1.0, 0.4, 0.25, *SEARCHES)
KEY = ("task", "active", "peak_lr", "seed")


def run(about: dict) -> dict:
    """One run of `Auto` with that part, in this process."""
    from hdet import Auto, find_lr  # noqa: PLC0415
    from hdet.controllers import LineSearch  # noqa: PLC0415
    from hdet_lab import ensemble_from_options, finder, run_start  # noqa: PLC0415

    part, made, short = about["active"], ensemble_from_options.make_controller, Auto.short
    if part in SEARCHES:
        finder.find_lr = lambda *given, **named: find_lr(*given, **{**named, "total_steps": SEARCHES[part]})
    else:
        Auto.short, search = 1000, LineSearch(active=part)
        run_start.Auto = functools.partial(Auto, short=1000)
        ensemble_from_options.make_controller = lambda *given: dataclasses.replace(
            made(*given), line_search=search, short=1000
        )
    try:
        row = one({"size": "standard", "optimizer": "adamw", "method": "auto", **about})
    finally:
        finder.find_lr, ensemble_from_options.make_controller, run_start.Auto, Auto.short = find_lr, made, Auto, short
    return {key: row[key] for key in (*KEY, "held_out", "steps", "cpu_seconds")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("rates")
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    done = {tuple(row[key] for key in KEY): row for row in rows}
    for part in PARTS:
        for rate in map(float, arguments.rates.split(",")):
            for seed in range(arguments.seeds):
                about = {"task": arguments.task, "active": part, "peak_lr": rate, "seed": seed}
                if tuple(about.values()) not in done:
                    row = run(about)
                    with RESULTS.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    done[tuple(about.values())] = row
                print(*done[tuple(about.values())].values(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
