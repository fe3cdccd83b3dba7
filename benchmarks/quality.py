"""What each method makes of a wrong learning rate: held-out loss against the best of a sweep, all compute charged.

    python benchmarks/quality.py plan                              # what the whole set is, and how long it takes
    python benchmarks/quality.py all --workers 2                   # run what is missing of it: under 2 hours on 2 cores
    python benchmarks/quality.py all --full --workers 2            # from every start with every seed: five hours
    python benchmarks/quality.py sweep flights                     # a part: the trusted sweep, plain OneCycleLR
    python benchmarks/quality.py starts flights --method auto      # a part: from 1/30 to 10 times its best rate
    python benchmarks/quality.py versus flights --method auto --seeds 10    # against plain, seed by seed: is it a tie?
    python benchmarks/quality.py table --write                     # results/quality-DATE.md, and the README's table
    python benchmarks/quality.py speed --write                     # results/speed-DATE.md: steps and seconds to a loss
    python benchmarks/quality.py pictures                          # results/quality-DATE-*.png
    python benchmarks/quality.py --smoke                           # every method for some steps, in a minute

Every run is one line of benchmarks/results/quality.jsonl; a second call runs what is missing there, so a stopped one
goes on. What `versus` runs beside these are lines of versus.jsonl. Peers are those of benchmarks/peers:
`pip install '.[lab,peers]'`.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import quality_report
from quality_methods import METHODS, STARTS, one

RESULTS = Path(__file__).parent / "results" / "quality.jsonl"
VERSUS = RESULTS.with_name("versus.jsonl")
SEEDS = 3
# Where the sweeps begin: nothing depends on it but the time until the best rate is inside.
FIRST = {
    ("digits", "adamw"): 8e-3, ("text", "adamw"): 4e-3, ("flights", "adamw"): 4e-4,
    ("digits", "sgd"): 0.128, ("text", "sgd"): 0.256, ("flights", "sgd"): 0.001,
}  # fmt: skip
SWEPT = 12  # runs of a sweep, about: seven rates, the best ones with three seeds


class Part(NamedTuple):
    """A task at a size, with the methods that are run on it.

    Attributes:
        starts: from where; None for all of a method's.
        seeds: how many of them; None for all.
    """

    task: str
    size: str
    methods: tuple[str, ...]
    starts: tuple[str, ...] | None = None
    seeds: int | None = None


ALL = tuple(name for name in METHODS if name != "line search")  # at 1,000 steps it is no choice: active.py
ONCE = ("hypergradient, constant", "hypergradient, relative")  # on one task
SLOW = ("paper", "hypergradient")  # from three starts where a run takes longer
FAR = ("1/30", "1", "10")
SET = (
    Part("flights", "standard", ALL),
    Part("digits", "standard", tuple(name for name in ALL if name not in ONCE + SLOW)),
    Part("digits", "standard", SLOW, FAR),
    Part("text", "standard", tuple(name for name in ALL if name not in (*ONCE, *SLOW, "plain", "auto"))),
    Part("text", "standard", ("plain", "auto"), FAR),
    Part("text", "standard", SLOW, FAR, seeds=1),
    Part("flights", "long", ("plain", "auto", "paper"), FAR),
    Part("text", "long", ("plain", "auto"), FAR),
    Part("text", "long", ("paper",), ("1/30",), seeds=1),
)
FULL = (  # the same, from every start with every seed
    Part("flights", "standard", ALL),
    Part("digits", "standard", tuple(name for name in ALL if name not in ONCE)),
    Part("text", "standard", tuple(name for name in ALL if name not in ONCE)),
    Part("flights", "long", ("plain", "auto", "paper")),
    Part("text", "long", ("plain", "auto")),
    Part("text", "long", ("paper",), ("1/30", "1/10", "10")),
    Part("digits", "long", ("plain", "auto")),
    Part("digits", "long", ("paper",), ("1/30", "1/10", "10")),
)


def key(run: dict) -> tuple:
    return tuple(run[name] for name in ("task", "size", "optimizer", "method", "peak_lr", "seed"))


def known(path: Path | None = None) -> dict[tuple, dict]:
    path = path or RESULTS
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {key(row): row for row in rows}


def run_all(runs: Sequence[dict], workers: int, path: Path | None = None) -> list[dict]:
    """The runs with their results, in order; each is written when it is done, to another file if `path` is given."""
    path = path or RESULTS
    found = known() | known(path)
    missing = [run for run in runs if key(run) not in found]
    if missing:
        context, kindly = multiprocessing.get_context("spawn"), (os.nice, (5,))
        with context.Pool(min(workers, len(missing)), *kindly, maxtasksperchild=1) as pool:
            for row in pool.imap_unordered(one, missing):
                with path.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                shown = {name: value for name, value in row.items() if name not in ("curve", "stepped")}
                print(*shown.values(), flush=True)
                found[key(row)] = row
    return [found[key(run)] for run in runs]


Runner = Callable[[Sequence[dict]], list[dict]]


def sweep(about: dict, seeds: list[int], run: Runner) -> dict[float, list[float]]:
    """The held-out losses of plain OneCycleLR by rate, the best one inside: ratio 2, the same seeds for every rate.

    A rate that is more than 2 % worse than the best with the first seed is not run with the others.
    """
    first = FIRST[about["task"], about["optimizer"]]
    losses: dict[int, list[float]] = {}

    def measure(exponents: list[int], seeds: list[int]) -> None:
        rates = [float(f"{first * 2.0**k:.6g}") for k in exponents]
        rows = run([{**about, "method": "plain", "peak_lr": rate, "seed": seed} for rate in rates for seed in seeds])
        for number, k in enumerate(exponents):
            part = rows[number * len(seeds) : (number + 1) * len(seeds)]
            losses[k] = losses.get(k, []) + [quality_report.loss(row) for row in part]

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


def best_rate(about: dict, seeds: list[int], run: Runner) -> tuple[float, float]:
    """The best rate of the sweep and its mean held-out loss."""
    losses = {rate: row for rate, row in sweep(about, seeds, run).items() if len(row) == len(seeds)}
    rate = min(losses, key=lambda r: statistics.fmean(losses[r]))
    return rate, statistics.fmean(losses[rate])


def runs_of(about: dict, name: str, rate: float, starts: Sequence[str] | None, seeds: list[int]) -> list[dict]:
    """The runs of a method: from multiples of the best rate, or at its own rates."""
    method = METHODS[name]
    wanted = method.starts if starts is None else [start for start in starts if start in STARTS]
    rates = method.rates or [float(f"{rate * STARTS[start]:.6g}") for start in wanted]
    return [{**about, "method": name, "peak_lr": r, "seed": seed} for r in rates for seed in seeds]


def run_set(parts: Sequence[Part], seeds: list[int], run: Runner) -> None:
    """The whole set, part by part."""
    for part in parts:
        about, chosen = {"task": part.task, "size": part.size, "optimizer": "adamw"}, seeds[: part.seeds]
        rate, best = best_rate(about, chosen, run)
        print(f"{part.task}, {part.size}: best of the sweep {best:.4f} at {rate:.3g}", flush=True)
        for name in part.methods:
            run(runs_of(about, name, rate, part.starts, chosen))


def plan(parts: Sequence[Part], seeds: list[int], workers: int) -> str:
    """How many runs the set has, how many are missing, and what the missing ones take, from measured seconds."""
    rows = known()
    lines, total, left = [], 0.0, 0.0
    for part in parts:
        about, chosen = {"task": part.task, "size": part.size, "optimizer": "adamw"}, seeds[: part.seeds]
        swept = 0
        try:
            rate = best_rate(about, chosen, functools.partial(_only, rows))[0]
        except _UnknownError:
            rate, swept = FIRST[part.task, "adamw"], SWEPT if part.seeds is None else SWEPT // 2
        for name in part.methods:
            wanted = runs_of(about, name, rate, part.starts, chosen)
            missing = [one for one in wanted if swept or key(one) not in rows]
            each, measured = seconds(rows, part.task, part.size, name)
            extra = swept if name == "plain" else 0
            total += each * (len(wanted) + extra) / 3600
            left += each * (len(missing) + extra) / 3600
            how = "" if measured else "  (estimated)"
            counts = f"{len(wanted) + extra:4d} runs {len(missing) + extra:4d} missing"
            lines.append(f"{part.task:8} {part.size:9} {name:24} {counts} {each:6.0f} s each{how}")
    end = f"{total:.1f} core-hours in all; missing: {left:.1f}, or {left / workers:.1f} hours with --workers {workers}"
    return "\n".join([*lines, end])


class _UnknownError(Exception):
    pass


def _only(rows: dict[tuple, dict], runs: Sequence[dict]) -> list[dict]:
    if any(key(one) not in rows for one in runs):
        raise _UnknownError
    return [rows[key(one)] for one in runs]


# Seconds of a plain run on one of two busy cores, and how much longer a method takes, as far as that was tried out.
SECONDS = {
    ("flights", "standard"): 10, ("text", "standard"): 65, ("digits", "standard"): 24,
    ("flights", "long"): 28, ("text", "long"): 190, ("digits", "long"): 240,
}  # fmt: skip
LONGER = {"paper": 2.5, "auto": 1.1, "population, batch": 1.4, "population, steps": 0.6}
LONGER_ON_DIGITS = {"paper": 1.2, "population, batch": 0.7, "population, steps": 0.3}  # plain has four too


def seconds(rows: dict[tuple, dict], task: str, size: str, method: str) -> tuple[float, bool]:
    """What one run takes on one of two busy cores: the median of those that were run, or an estimate."""
    mine = [row for row in rows.values() if (row["task"], row["size"], row["method"]) == (task, size, method)]
    worked = [row["cpu_seconds"] for row in mine if "cpu_seconds" in row]
    if worked:
        return statistics.median(worked), True
    longer = LONGER_ON_DIGITS if task == "digits" else LONGER
    return SECONDS[task, size] * longer.get(method, 1.0), False


def smoke(steps: int = 20) -> list[dict]:
    """Every method for some steps of one task, in this process. It shows that all of it runs, and no more."""
    about = {"task": "digits", "size": "smoke", "optimizer": "adamw", "seed": 0}
    rows = [one({**about, "method": "plain", "peak_lr": rate}, steps) for rate in (3e-3, 3e-2, 0.3)]
    best = min(rows, key=quality_report.loss)["peak_lr"]
    for name in METHODS:
        if name != "plain":
            (run,) = runs_of(about, name, best, ["1"], [0])[len(METHODS[name].rates) // 2 :][:1]
            rows.append(one(run, steps))
            print(f"{name}: {rows[-1]['held_out']:.4f}, {rows[-1]['stepped']}", file=sys.stderr, flush=True)
    return rows


def on_grid(row: dict) -> bool:
    """Whether its rate is one of the sweep's, and not a start."""
    exponent = math.log2(row["peak_lr"] / FIRST[row["task"], row["optimizer"]])
    return abs(exponent - round(exponent)) < 1e-3


def starts(arguments: argparse.Namespace, about: dict, seeds: list[int], run: Runner) -> None:
    """One method from its starts, and what came out."""
    rate, best = best_rate(about, seeds, run)
    chosen = None if arguments.starts is None else arguments.starts.split(",")
    rows = run(runs_of(about, arguments.method, rate, chosen, seeds))
    print(f"best of the sweep: {best:.4f} at {rate:.3g}")
    for peak in dict.fromkeys(row["peak_lr"] for row in rows):
        part = [100 * (quality_report.loss(row) / best - 1) for row in rows if row["peak_lr"] == peak]
        shown = [round(x, 1) for x in part]
        print(f"{arguments.method} at {peak:.3g}: regret {statistics.fmean(part):.1f} %", shown)


def versus(arguments: argparse.Namespace, about: dict, run: Runner) -> None:
    """A method against the plain schedule from the same starts, seed by seed: where means say too little."""
    rate, _ = best_rate(about, list(range(SEEDS)), run)
    for start in (arguments.starts or "10").split(","):
        mine, plain = (
            run_all(runs_of(about, name, rate, [start], list(range(arguments.seeds))), arguments.workers, path=VERSUS)
            for name in (arguments.method, "plain")
        )
        gains = [100 * (1 - quality_report.loss(a) / quality_report.loss(b)) for a, b in zip(mine, plain, strict=True)]
        means = [statistics.fmean(map(quality_report.loss, rows)) for rows in (mine, plain)]
        error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
        print(
            f"from {start}: {arguments.method} {means[0]:.5f}, plain {means[1]:.5f}; lower by "
            f"{statistics.fmean(gains):.3f} +- {error:.3f} %, in {sum(g > 0 for g in gains)} of {len(gains)} seeds"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = ("plan", "all", "sweep", "starts", "versus", "table", "speed", "pictures")
    parser.add_argument("what", nargs="?", choices=verbs, default="plan")
    parser.add_argument("task", nargs="?")
    parser.add_argument("--size", default="long")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--method", default="plain", choices=list(METHODS))
    parser.add_argument("--starts", help="multiples of the best rate: 1/10,1,10; default: the method's")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--full", action="store_true", help="plan, all: from every start with every seed")
    parser.add_argument("--write", action="store_true", help="table: into benchmarks/results/quality-DATE.md")
    parser.add_argument("--smoke", action="store_true", help="every method for some steps, and nothing is written")
    arguments = parser.parse_args()
    seeds, run = list(range(arguments.seeds)), functools.partial(run_all, workers=arguments.workers)
    about = {"task": arguments.task, "size": arguments.size, "optimizer": arguments.optimizer}
    if arguments.smoke:
        print(quality_report.tables(smoke(), on_grid=lambda row: True))
    elif arguments.what == "plan":
        print(plan(FULL if arguments.full else SET, seeds, arguments.workers))
    elif arguments.what == "all":
        run_set(FULL if arguments.full else SET, seeds, run)
    elif arguments.what in ("table", "speed", "pictures"):
        print(quality_report.report(arguments.what, list(known().values()), on_grid, RESULTS, arguments.write))
    elif arguments.task is None:
        parser.error(f"{arguments.what} needs a TASK: digits, flights or text")
    elif arguments.what == "sweep":
        for rate, row in sweep(about, seeds, run).items():
            print(f"{rate:.3g}", f"{statistics.fmean(row):.4f}", [round(value, 4) for value in row])
    elif arguments.what == "versus":
        versus(arguments, about, run)
    else:
        starts(arguments, about, seeds, run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
