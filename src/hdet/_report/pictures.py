"""Pictures of a run for papers and READMEs, as PNG. Needs matplotlib, imported when it is asked for."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

from hdet._report.columns import columns, points
from hdet._report.run import Run
from hdet._report.search import find_search

_DOTS = 3000


def draw(run: Run, folder: Path, chosen: int | None = None) -> list[Path]:
    """The fan, the losses, the factors with their confidence, the line search of a round, the cost, and the search for
    the rate before the first step.

    Args:
        run: the run to draw.
        folder: output folder.
        chosen: the index of the round of the line search; by default the last that has one.

    Raises:
        RuntimeError: without matplotlib, with what to install.
    """
    plt = pyplot()
    told = columns(run.lines)
    names = list(told["hyperparameters"])
    drawn = {}
    if names:  # a plain run has losses only
        drawn["fan"] = _figure(plt, names, lambda axis, name: _fan(axis, told, name, run))
        drawn["factor"] = _figure(plt, names, lambda axis, name: _factor(axis, told, name))
    if run.lines or run.losses:
        drawn["losses"] = _figure(plt, [""], lambda axis, _: _losses(axis, told, run))
        drawn["cost"] = _figure(plt, [""], lambda axis, _: _cost(axis, told))
    search = find_search(run.lines, run.search)
    if search is not None:
        drawn["search"] = _figure(plt, [""], lambda axis, _: _search(axis, search))
    at = _with_losses(told) if chosen is None else chosen
    if at is not None:
        drawn["line_search"] = _figure(plt, names, lambda axis, name: _line_search(axis, told, name, at, run))
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind, figure in drawn.items():
        paths.append(folder / f"{kind}.png")
        figure.savefig(paths[-1], dpi=120)
        plt.close(figure)
    return paths


def draw_fan(run: Run, picture: Path) -> Path | None:
    """Draw the tried values and, below, the factor on the schedule in one picture; None if nothing fanned out.

    Raises:
        RuntimeError: without matplotlib, with what to install.
    """
    plt = pyplot()
    told = columns(run.lines)
    names = list(told["hyperparameters"])
    if not names:
        return None
    width = 8.0 if len(names) == 1 else 4.5 * len(names)
    figure, axes = plt.subplots(2, len(names), figsize=(width, 6.5), squeeze=False, sharex=True)
    for column, name in enumerate(names):
        above, below = axes[0][column], axes[1][column]
        _fan(above, told, name, run)
        _factor(below, told, name)
        above.set(title=_plain(name), xlabel="")
        for axis in (above, below):
            axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    plt.close(figure)
    return picture


def _figure(plt: Any, names: list[str], paint: Any) -> Any:
    width = 7.5 if len(names) == 1 else 5.0 * min(len(names), 4)
    rows = math.ceil(len(names) / 4)
    figure, axes = plt.subplots(rows, min(len(names), 4), figsize=(width, 4.2 * rows), squeeze=False)
    for axis, name in zip(axes.flat, names, strict=False):
        paint(axis, name)
        axis.set_title(_plain(name))
        axis.grid(alpha=0.3)
    figure.tight_layout()
    return figure


def _fan(axis: Any, told: dict[str, Any], name: str, run: Run) -> None:
    row, steps = told["hyperparameters"][name], told["step"]
    values = [_nan(column) for column in row["values"]]
    axis.fill_between(steps, _fold(min, values), _fold(max, values), alpha=0.2, label="lowest to highest")
    if len(steps) <= _DOTS and len(values) == len(run.lines[-1]["scores"]):
        for column in values:
            axis.plot(steps, column, ".", markersize=3)
    axis.plot(steps, _nan(row["base"]), "k--", linewidth=1, label="schedule")
    axis.plot(steps, _nan(row["center"]), "k-", linewidth=1.2, label="center")
    axis.set_xlabel("step")
    axis.set_ylabel(quantity(name))
    axis.legend(fontsize="small")


def _factor(axis: Any, told: dict[str, Any], name: str) -> None:
    row, steps = told["hyperparameters"][name], told["step"]
    scale = _nan(row["scale"])
    before, estimate, error = (_nan(row[key]) for key in ("scale_before", "estimate", "error"))
    reach = [
        [b * math.exp(min(max(d + sign * 2 * e, -40.0), 40.0)) for b, d, e in zip(before, estimate, error, strict=True)]
        for sign in (-1, 1)
    ]
    axis.fill_between(steps, *reach, alpha=0.2, label="evidence, 2 standard errors")
    axis.axhline(1.0, color="k", linestyle="--", linewidth=1, label="schedule")
    axis.plot(steps, scale, drawstyle="steps-post", label="factor")
    known = [x for x in scale if math.isfinite(x) and x > 0] or [1.0]
    low, high = min(1.0, *known), max(1.0, *known)
    if high / low > 4:
        axis.set_yscale("log")
        axis.set_ylim(low / 2, high * 2)
    else:
        axis.set_ylim(low - 0.25 * (high - low) - 0.05, high + 0.25 * (high - low) + 0.05)
    axis.set_xlabel("step")
    axis.set_ylabel("times the schedule")
    axis.legend(fontsize="small")


def _losses(axis: Any, told: dict[str, Any], run: Run) -> None:
    steps = told["step"]
    judged = told["probe"] if any(x is not None for column in told["probe"] for x in column) else told["scores"]
    for column in judged:
        axis.plot(steps, _nan(column), ".", markersize=2.5, alpha=0.7)
    consensus = [*told["start"][1:], None]
    if any(x is not None for x in consensus):
        axis.plot(steps, _nan(consensus), "k-", linewidth=1.2, label="consensus")
    elif any(x is not None for x in told["mean"]):
        axis.plot(steps, _nan(told["mean"]), "k-", linewidth=1.2, label="mean of the replicas")
    elif any(x is not None for x in told["own"]) and not run.losses:
        known = [(s, x) for s, x in zip(steps, told["own"], strict=True) if x is not None]
        axis.plot(*zip(*known, strict=True), label="first replica")
    elif run.losses:
        axis.plot(*zip(*[(s, math.nan if x is None else x) for s, x, _ in run.losses], strict=True), label="mean")
    axis.set_xlabel("step")
    axis.set_ylabel("loss on the probe" if judged is told["probe"] else "training loss of the round")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize="small")


def _line_search(axis: Any, told: dict[str, Any], name: str, at: int, run: Run) -> None:
    row, start = told["hyperparameters"][name], told["start"][at]
    raw = points(run.lines, at).get(str(at))
    probed = any(column[at] is not None for column in told["probe"])
    losses = raw["losses"] if raw else [column[at] for column in told["probe" if probed else "scores"]]
    values = raw["values"][name] if raw else [column[at] for column in row["values"]]
    center, level = row["center"][at] or 1.0, start if probed and start is not None else 0.0
    known = [(v / center, loss - level) for v, loss in zip(values, losses, strict=True) if None not in (v, loss)]
    axis.plot(*zip(*known, strict=True), "o", label="replicas")
    if row["fit"][at] is not None:
        c, a, b = row["fit"][at]
        vertex = -a / (2 * b) if b > 0 > a else None
        marks = [x for x in (vertex, row["target"][at]) if x is not None and x < 4]
        xs = [k / 120 * 1.1 * max([rho for rho, _ in known] + marks) for k in range(121)]
        axis.plot(xs, [c + a * x + b * x * x for x in xs], "-", color="0.5", label="parabola")
        for x, label in ((vertex, "vertex"), (row["target"][at], "target of the vertex")):
            if x is not None and x < 4:
                axis.plot([x], [c + a * x + b * x * x], "D", markersize=8, label=label)
    axis.set_xlabel(f"times the center, round {told['round'][at]}")
    axis.set_ylabel("loss - loss at the start" if level else "loss")
    axis.legend(fontsize="small")


def _cost(axis: Any, told: dict[str, Any]) -> None:
    for part in ("converge", "probe"):
        seconds = zip(_nan(told[f"{part}_seconds"]), _nan(told["round_seconds"]), strict=True)
        axis.plot(told["step"], [100 * x / whole if whole else math.nan for x, whole in seconds], label=part)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("step")
    axis.set_ylabel("% of the round's time")
    axis.legend(fontsize="small")


def _search(axis: Any, search: dict[str, Any]) -> None:
    for label, ramp in (("first ramp", search["coarse"]), ("second ramp", search["fine"])):
        axis.plot(ramp[0], _nan(ramp[1]), ".-", label=label)
    if search["low"] is not None:
        axis.axvspan(search["low"], search["high"], alpha=0.15, color="tab:green", label="low losses")
        if search["lower"] is not None and search["lower"] < search["low"]:
            axis.axvspan(search["lower"], search["low"], alpha=0.06, color="tab:green", label="counted too")
    axis.axvline(search["rate"], color="k", linestyle="--", label=f"found: {search['rate']:.3g}")
    if search["first_loss"] is not None:
        axis.axhline(search["first_loss"], color="0.6", linestyle=":", label="initial weights")
    axis.set_xscale("log")
    axis.set_xlabel("learning rate")
    axis.set_ylabel("loss on the probe")
    axis.legend(fontsize="small")


def _with_losses(told: dict[str, Any]) -> int | None:
    """The last round in which replicas with different values were compared."""
    rounds = range(len(told["step"]) - 1, -1, -1)
    spread = [row["values"] for row in told["hyperparameters"].values()]
    differ = (at for at in rounds if any(len({column[at] for column in values}) > 1 for values in spread))
    return next((at for at in differ if told["best"][at] is not None), None)


def quantity(name: str) -> str:
    """The kind of a hyperparameter's values: "learning_rate/dense" is a learning rate."""
    return _plain(name.partition("/")[0].replace("_", " "))


def _nan(column: list[float | None]) -> list[float]:
    return [math.nan if x is None else x for x in column]


def _fold(fold: Any, rows: list[list[float]]) -> list[float]:
    return [fold(row) for row in zip(*rows, strict=True)]


def _plain(name: str) -> str:
    """A name as matplotlib shows it: no mathematics, and not too long."""
    return name[:60].replace("$", r"\$")


def pyplot() -> Any:
    """matplotlib, drawing to files only.

    Raises:
        RuntimeError: without it, with what to install.
    """
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ModuleNotFoundError as error:
        raise RuntimeError("pictures need matplotlib, which is not installed: pip install 'hdet[report]'") from error
