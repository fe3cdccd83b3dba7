"""Two changes to find_lr that were tried and not adopted: a fine ramp from weights that have been trained for a while,
for starts on a plateau, and one that begins higher, to be cheaper.

    python benchmarks/plateau.py run flights-adamw flights-sgd    # what is missing of results/plateau.jsonl
    python benchmarks/plateau.py table                            # the middle of the interval, in best rates

Every search is one line: one coarse ramp, then a fine one per variant. Cost is in training steps, coarse ramp included.
The rows that are there are of 2026-11-16, when the coarse ramp was scored every 2 steps and the fine one rose evenly.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

from finder import BEST, FAR, SEEDS, STARTS

RESULTS = Path(__file__).parent / "results" / "plateau.jsonl"


class Variant(NamedTuple):
    """Steps before the fine ramp, at what part of the coarse ramp's A, and how far above its usual start it begins."""

    settle: int = 0
    at: float = 1.0
    higher: float = 1.0


VARIANTS = {
    "as released": Variant(),
    "100 steps at A": Variant(100),
    "300 steps at A": Variant(300),
    "300 steps at A/16": Variant(300, 1 / 16),
    "from A/2": Variant(higher=2.0),
}


def known() -> list[dict]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def search(task: str, optimizer: str, seed: int, start: str) -> dict[str, dict]:
    """The interval's middle and the cost of each variant, in this process."""
    import hdet  # noqa: PLC0415
    from hdet._find_lr.decisions import Coarse  # noqa: PLC0415
    from hdet._find_lr.trial import Bench  # noqa: PLC0415
    from hdet_lab.ensemble_from_options import make_probe  # noqa: PLC0415
    from hdet_lab.options import RunOptions  # noqa: PLC0415

    peak_lr = float(f"{BEST[task, optimizer] * STARTS[start]:.6g}")
    options = RunOptions(
        task, size="long", seed=seed, optimizer=optimizer, peak_lr=peak_lr, replicas=1, controller="auto"
    )
    made = options.make_task()

    def work() -> dict[str, dict]:
        model = hdet.data_parallel(made.model())

        def step(index: int) -> None:
            made.loss(model, made.batch(index, 0, 1), options.label_smoothing).backward()

        optimizers = [made.optimizer(model, peak_lr, optimizer)]
        bench = Bench(model, optimizers, step, make_probe(options, made), (), hdet.find_replicas())
        bench.rewind()
        first, coarse = bench.score(), Coarse()
        curve = bench.ramp(coarse.ramp(bench.start), coarse.every, lambda curve: coarse.over(curve, first))
        half_way = coarse.half_way(curve, first)
        if half_way is None:
            raise RuntimeError(f"the coarse ramp of {task} from {start} finds no drop")
        before = _cost(bench, made)
        found = {}
        for name, variant in VARIANTS.items():
            began = _cost(bench, made)
            middle = _fine(bench, variant, half_way, first)
            found[name] = {"middle": middle, "cost": round(before + _cost(bench, made) - began)}
        return found

    return hdet.in_process(work, 1)[0]


def _cost(bench: Any, task: Any) -> float:
    return bench.steps + bench.samples / 3 / task.global_batch


def _fine(bench: Any, variant: Variant, half_way: float, first: float) -> float | None:
    """The middle of the fine ramp's interval; None if the loss does not fall."""
    from hdet._find_lr.decisions import Fine  # noqa: PLC0415

    fine = Fine()
    ramp = fine.ramp(variant.higher * half_way)
    settling = [(index, variant.at * half_way) for index in range(variant.settle)]
    bench.ramp(settling, 1 + len(settling), lambda curve: False)
    begins = bench.score() if settling else first
    curve = []
    for number, (index, rate) in enumerate(ramp):
        bench._step(variant.settle + index, rate)
        if (number + 1) % fine.every == 0:
            curve.append((rate, bench.score()))
            if fine.over(curve, begins):
                break
    interval = fine.interval(curve, begins)
    return None if interval is None else math.sqrt(interval[0] * interval[1])


def run(parts: list[str]) -> None:
    """Every search of these parts that has no line yet."""
    done = {tuple(row[key] for key in ("task", "optimizer", "seed", "start")) for row in known()}
    for task, optimizer in (part.split("-") for part in parts):
        for seed in SEEDS:
            for start in FAR:
                if (task, optimizer, seed, start) not in done:
                    about = {"task": task, "optimizer": optimizer, "seed": seed, "start": start}
                    row = about | {"variants": search(task, optimizer, seed, start)}
                    with RESULTS.open("a") as file:
                        file.write(json.dumps(row) + "\n")


def table() -> None:
    """By variant, optimizer and seed: middles in multiples of the best rate, and the costs."""
    print("| | variant | by seed, from 1/30, 1 and 10 | log-sd by seed | cost |\n|---|---|---|---|---|")
    for task, optimizer in BEST:
        mine = [row for row in known() if (row["task"], row["optimizer"]) == (task, optimizer)]
        for name in VARIANTS if len(mine) == len(SEEDS) * len(FAR) else ():
            by_seed = [[row["variants"][name]["middle"] for row in mine if row["seed"] == seed] for seed in SEEDS]
            best = BEST[task, optimizer]
            shown = "; ".join(" ".join("none" if m is None else f"{m / best:.3g}" for m in ms) for ms in by_seed)
            spreads = " ".join("-" if None in ms else f"{statistics.stdev(map(math.log, ms)):.2f}" for ms in by_seed)
            costs = [row["variants"][name]["cost"] for row in mine]
            print(f"| {task}, {optimizer} | {name} | {shown} | {spreads} | {min(costs)} to {max(costs)} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("parts", nargs="*", metavar="TASK-OPTIMIZER", default=["flights-adamw", "flights-sgd"])
    arguments = parser.parse_args()
    if arguments.what == "run":
        run(arguments.parts)
    else:
        table()
    return 0


if __name__ == "__main__":
    sys.exit(main())
