"""Tables and pictures of the rows of benchmarks/quality.py."""

from __future__ import annotations

import math
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from provenance import DATE, header
from quality_methods import METHODS, SCHEDULE_FREE_DEFAULT, STARTS

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- quality: begin, written by benchmarks/quality.py table --write -->", "<!-- quality: end -->"
OnGrid = Callable[[dict], bool]
_COLUMNS = 3  # panels side by side


def loss(row: dict) -> float:
    return math.inf if row["held_out"] is None or not math.isfinite(row["held_out"]) else row["held_out"]


def seconds(row: dict) -> float:
    """Of a core; by the clock in rows that do not have it."""
    return row.get("cpu_seconds", row["seconds"])


class Study(NamedTuple):
    """The rows of one task, size and optimizer, and what they are compared with.

    Attributes:
        about: the task, the size, the optimizer.
        rows: all of them.
        swept: those of the sweep.
        rate: its best rate, of those with the most seeds.
        best: the held-out loss at that rate, by seed.
    """

    about: tuple[str, str, str]
    rows: list[dict]
    swept: list[dict]
    rate: float
    best: dict[int, float]

    def regret(self, row: dict) -> float:
        """In %, against the same seed at the best rate."""
        return 100 * (loss(row) / self.best.get(row["seed"], statistics.fmean(self.best.values())) - 1)

    def of(self, method: str, rate: float | None = None) -> list[dict]:
        return [r for r in self.rows if r["method"] == method and (rate is None or r["peak_lr"] == rate)]

    def start(self, name: str) -> float:
        return float(f"{self.rate * STARTS[name]:.6g}")


def studies(rows: Iterable[dict], on_grid: OnGrid) -> list[Study]:
    """One for each task, size and optimizer that has a sweep."""
    by_about: dict[tuple[str, str, str], list[dict]] = {}
    for row in rows:
        by_about.setdefault((row["task"], row["size"], row["optimizer"]), []).append(row)
    found = []
    for about, mine in sorted(by_about.items()):
        by_rate: dict[float, list[dict]] = {}
        for row in mine:
            if row["method"] == "plain" and on_grid(row):
                by_rate.setdefault(row["peak_lr"], []).append(row)
        most = max(map(len, by_rate.values()), default=0)
        means = {rate: statistics.fmean(map(loss, part)) for rate, part in by_rate.items() if len(part) == most}
        if means:
            rate = min(means, key=means.__getitem__)
            swept = [row for part in by_rate.values() for row in part]
            found.append(Study(about, mine, swept, rate, {row["seed"]: loss(row) for row in by_rate[rate]}))
    return found


def tables(rows: Iterable[dict], on_grid: OnGrid) -> str:
    """Regret in %: the mean, in brackets the worst seed and the number of seeds; costs in plain runs."""
    return "\n\n".join(_tables_of(study) for study in studies(rows, on_grid))


def _tables_of(study: Study) -> str:
    mean = statistics.fmean(study.best.values())
    lines = [f"### {', '.join(study.about)}: best {mean:.4f} at {study.rate:.3g} ({len(study.best)} seeds)", ""]
    lines += [f"| method | {' | '.join(STARTS)} | cost | time |", "|---|" + "---|" * (len(STARTS) + 2)]
    methods = dict.fromkeys(row["method"] for row in study.rows)
    for name in (name for name in METHODS if name in methods and not METHODS[name].rates):
        cells = [_cell(study, study.of(name, study.start(start))) for start in STARTS]
        lines.append(f"| {METHODS[name].what} | {' | '.join(cells)} | {_costs(study, study.of(name))} |")
    fixed = _without_start(study)
    if fixed:
        lines += ["", "| method without a start | regret | cost | time |", "|---|---|---|---|"]
        for what, mine, runs in fixed:
            lines.append(f"| {what} | {_cell(study, mine)} | {_costs(study, mine, runs)} |")
    return "\n".join([*lines, "", _sweep_cost(study)])


def _without_start(study: Study) -> list[tuple[str, list[dict], int]]:
    """What such a method is, its rows, and how many runs it took to have them."""
    found = []
    for name, method in METHODS.items():
        mine = study.of(name)
        if not method.rates or not mine:
            continue
        if len(method.rates) == 1:
            found.append((method.what, mine, 1))
            continue
        by_rate = {rate: study.of(name, rate) for rate in method.rates if study.of(name, rate)}
        if SCHEDULE_FREE_DEFAULT in by_rate:
            what = f"{method.what}, its default rate of {SCHEDULE_FREE_DEFAULT:g}"
            found.append((what, by_rate[SCHEDULE_FREE_DEFAULT], 1))
        if len(by_rate) == len(method.rates):
            best = min(by_rate, key=lambda rate: statistics.fmean(map(loss, by_rate[rate])))
            rates = ", ".join(f"{rate:g}" for rate in by_rate)
            found.append((f"{method.what}, best of {rates}: {best:g}", by_rate[best], len(by_rate)))
    return found


def _cell(study: Study, rows: list[dict]) -> str:
    regrets = [study.regret(row) for row in rows]
    if not regrets:
        return ""
    return f"{_percent(statistics.fmean(regrets))} ({_percent(max(regrets))}; {len(rows)})"


def _percent(value: float) -> str:
    return f"{round(value, 1) + 0.0:.1f}" if math.isfinite(value) else "diverged"  # no minus before a zero


def _costs(study: Study, rows: list[dict], runs: int = 1) -> str:
    """In plain runs: what is charged, and what was measured."""
    cost = runs * statistics.fmean(row.get("cost", 1.0) for row in rows)
    took = [[row["cpu_seconds"] for row in part if "cpu_seconds" in row] for part in (rows, study.swept)]
    ratio = f"{runs * statistics.median(took[0]) / statistics.median(took[1]):.1f}" if all(took) else ""
    return f"{cost:.2f} | {ratio}"


def _sweep_cost(study: Study) -> str:
    """What the sweep took that a method without one saves."""
    first = [row for row in study.swept if row["seed"] == min(study.best)]
    hours = sum(map(seconds, first)) / 3600
    auto = [row for row in study.of("auto") if row["seed"] in study.best]
    said = f"The sweep: {len(first)} rates, so {len(first)} plain runs with one seed, {hours:.2f} core-hours."
    if auto:
        one = statistics.fmean(map(seconds, auto)) / 3600
        said += f" One run with `Auto` instead: {one:.2f} core-hours, {len(first) - 1} plain runs saved."
    return said


def readme_table(rows: Iterable[dict], on_grid: OnGrid) -> str:
    """A line for each method, a column for each study with AdamW in which `Auto` was run: the mean regret, of the best
    and of the worst start where the method has one.
    """
    shown = [study for study in studies(rows, on_grid) if study.about[2] == "adamw" and study.of("auto")]
    cells: dict[str, list[str]] = {}
    costs: dict[str, list[float]] = {}

    def put(what: str, column: int, regrets: list[float], cost: float) -> None:
        low, high = (_percent(end) for end in (min(regrets), max(regrets)))
        cells.setdefault(what, [""] * len(shown))[column] = low if low == high else f"{low} .. {high}"
        costs.setdefault(what, []).append(cost)

    for column, study in enumerate(shown):
        for name, method in METHODS.items():
            parts = [] if method.rates else [study.of(name, study.start(start)) for start in STARTS]
            regrets = [statistics.fmean(map(study.regret, part)) for part in parts if part]
            if regrets:
                cost = statistics.fmean(row.get("cost", 1.0) for part in parts for row in part)
                put(method.what, column, regrets, cost)
        for what, mine, runs in _without_start(study):
            cost = runs * statistics.fmean(row.get("cost", 1.0) for row in mine)
            put(what.rpartition(": ")[0] or what, column, [statistics.fmean(map(study.regret, mine))], cost)
    where = " | ".join(f"{task}, {size}" for task, size, _ in (study.about for study in shown))
    lines = [f"| regret in % | {where} | cost |", "|---|" + "---|" * (len(shown) + 1)]
    lines += [f"| {what} | {' | '.join(row)} | {max(costs[what]):.2f} |" for what, row in cells.items()]
    return "\n".join(lines)


def fill_readme(text: str, readme: Path = README) -> None:
    """Put a text between the marks."""
    before, _, rest = readme.read_text().partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{readme} must have a line {BEGIN} and a line {END}")
    readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def speed(rows: Iterable[dict], on_grid: OnGrid) -> str:
    """When each method reaches the final loss of the plain schedule at the best rate, and from the same start."""
    found = []
    for study in studies(rows, on_grid):
        best = [row for row in study.of("plain", study.rate) if row.get("curve")]
        if not best:
            continue
        length = best[0]["curve"][-1][0]
        lines = [f"### {', '.join(study.about)}: {length} steps", ""]
        lines += ["| method | start | to the best rate's final loss | within 1 % of it | to plain's from this start |"]
        lines += ["|---|---|---|---|---|"]
        for name in METHODS:
            for start in STARTS if not METHODS[name].rates else [""]:
                rate = study.start(start) if start else None
                mine = [row for row in study.of(name, rate) if row.get("curve")]
                if mine:
                    plain = {row["seed"]: loss(row) for row in study.of("plain", rate)} if start else {}
                    targets = (study.best, {seed: 1.01 * x for seed, x in study.best.items()}, plain)
                    cells = " | ".join(_reached(mine, target) for target in targets)
                    lines.append(f"| {METHODS[name].what} | {start} | {cells} |")
        found.append("\n".join(lines))
    return "\n\n".join(found)


def _reached(rows: list[dict], target: dict[int, float]) -> str:
    mine = [row for row in rows if row["seed"] in target]
    if not mine:
        return ""
    first = [
        next(
            ((steps, seconds) for steps, seconds, x in row["curve"] if x is not None and x <= target[row["seed"]]), None
        )
        for row in mine
    ]
    there = [pair for pair in first if pair is not None]
    if 2 * len(there) <= len(mine):
        return "never" if not there else f"{len(there)} of {len(mine)} seeds"
    steps, took = (statistics.median(pair[i] for pair in there) for i in (0, 1))
    return f"{steps:.0f} steps, {took:.0f} s"


def pictures(rows: Iterable[dict], on_grid: OnGrid, folder: Path) -> list[Path]:
    """Regret against the start, and regret against the cost; a panel for each task, size and optimizer."""
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    found = [study for study in studies(rows, on_grid) if len(study.rows) > len(study.swept)]
    drawn = []
    for kind, draw in (("starts", _draw_starts), ("cost", _draw_cost)):
        columns = min(_COLUMNS, len(found))
        rows_of = math.ceil(len(found) / columns)
        figure, axes = pyplot.subplots(rows_of, columns, figsize=(4.5 * columns, 3.8 * rows_of + 1), squeeze=False)
        for axis in axes.flat[len(found) :]:
            axis.axis("off")
        for axis, study in zip(axes.flat, found, strict=False):
            draw(axis, study)
            axis.set_title(", ".join(study.about))
            axis.set_yscale("symlog", linthresh=1)
            axis.grid(alpha=0.3)
        for axis in axes[:, 0]:
            axis.set_ylabel("regret in %, mean over seeds")
        handles = {label: h for axis in axes.flat for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=3, fontsize="small")
        legend = (0.3 + 0.22 * math.ceil(len(handles) / 3)) / figure.get_figheight()
        figure.tight_layout(rect=(0, legend, 1, 1))
        path = folder / f"quality-{DATE}-{kind}.png"
        figure.savefig(path, dpi=100)
        pyplot.close(figure)
        drawn.append(path)
    return drawn


def _finite(values: Iterable[float]) -> float:
    return min(statistics.fmean(values), 1e4)  # a run that diverged is at the top


def _draw_starts(axis, study: Study) -> None:
    for number, (name, method) in enumerate(METHODS.items()):
        parts = {} if method.rates else {s: study.of(name, study.start(start)) for start, s in STARTS.items()}
        points = [(s, _finite(map(study.regret, part))) for s, part in parts.items() if part]
        if points:
            axis.plot(*zip(*points, strict=True), "o-", color=f"C{number}", markersize=4, label=method.what)
    for number, (what, mine, _) in enumerate(_without_start(study)):
        label = what.partition(":")[0] if "best of" in what else what
        axis.axhline(_finite(map(study.regret, mine)), color=f"C{number}", linestyle=":", label=label)
    axis.set_xscale("log")
    axis.set_xticks(list(STARTS.values()), list(STARTS))
    axis.set_xlabel("start, times the best rate")


def _draw_cost(axis, study: Study) -> None:
    for number, (name, method) in enumerate(METHODS.items()):
        parts = [] if method.rates else [study.of(name, study.start(start)) for start in STARTS]
        regrets = [_finite(map(study.regret, part)) for part in parts if part]
        if regrets:
            cost = statistics.fmean(row.get("cost", 1.0) for part in parts for row in part)
            bars = [[statistics.fmean(regrets) - min(regrets)], [max(regrets) - statistics.fmean(regrets)]]
            style = {"color": f"C{number}", "capsize": 3, "label": f"{method.what} (bar: best and worst start)"}
            axis.errorbar([cost * 1.03**number], [statistics.fmean(regrets)], bars, fmt="o", **style)
    for number, (what, mine, runs) in enumerate(_without_start(study)):
        cost = runs * statistics.fmean(row.get("cost", 1.0) for row in mine)
        label = what.partition(":")[0] if "best of" in what else what
        axis.plot([cost], [_finite(map(study.regret, mine))], "s", color=f"C{number}", label=label)
    rates = len([row for row in study.swept if row["seed"] == min(study.best)])
    axis.plot([rates], [0.0], "k*", markersize=12, label="OneCycleLR at the best of the sweep")
    axis.set_xscale("log")
    axis.set_xlabel("compute, in plain runs")


ABOUT = """\
Regret in %: held-out loss over that of the best rate of a sweep at the same length with the same seeds, minus 1. In
brackets the worst seed and the number of seeds. Cost: all compute, in units of one plain run; a forward pass counts as
a third of a step. What a finder, a probe or a score costs is taken from the steps of its own run. Time: seconds of a
core over those of a plain run, where the rows have them: both may have shared the machine with other runs.

How each is run: the paper's controller with a temperature of 0.1 and a spread of 1/9 after a third of the run, four
replicas; `Auto` as it comes; Prodigy and D-Adaptation with lr 1, the first under cosine annealing, the second under
OneCycleLR; Schedule-Free with a warm-up of a twentieth; range tests of 100 steps; hypergradient descent with a beta of
1e-7 (additive) and 0.02 (multiplicative); populations on OneCycleLR, 20 rounds. `benchmarks/peers` says why."""


SPEED = """\
When each method first reaches the final held-out loss of plain OneCycleLR at the best rate of the sweep, that loss
within 1 %, and the final loss of plain OneCycleLR from the same start. Steps are compute in units of a plain step, with
whatever was spent on a finder or a probe; seconds are by the clock. Medians over the seeds; the loss is measured 20
times in a run, which is not charged."""


def report(what: str, rows: list[dict], on_grid: OnGrid, results: Path, write: bool) -> str:
    """Print, or write into the folder of the results, what was asked for."""
    if what == "pictures":
        return "\n".join(map(str, pictures(rows, on_grid, results.parent)))
    title = "What each method makes of a wrong start" if what == "table" else "How fast each method gets there"
    body = f"{ABOUT}\n\n{tables(rows, on_grid)}" if what == "table" else f"{SPEED}\n\n{speed(rows, on_grid)}"
    how = (
        f"Written by `python {shlex.join(sys.argv)}` from `{results.name}`, one line per run. Its rows come from\n"
        "`python benchmarks/quality.py all --workers 2`, or part by part from `sweep` and `starts`."
    )
    text = f"{header(title, how, sorted({row['seed'] for row in rows}))}{body}\n"
    if write:
        written = results.parent / f"{'quality' if what == 'table' else what}-{DATE}.md"
        written.write_text(text)
        if what == "table":
            fill_readme(f"{readme_table(rows, on_grid)}\n\n{_links(written)}")
    return text


def _links(written: Path) -> str:
    """To the file of a table, and to its picture where it was drawn before."""
    folder = written.parent.relative_to(README.parent).as_posix()
    picture = f"{written.stem}-starts.png"
    shown = (
        f"\n\n![regret against the start, by task]({folder}/{picture})" if (written.parent / picture).exists() else ""
    )
    return f"[With seeds, costs and versions]({folder}/{written.name}).{shown}"
