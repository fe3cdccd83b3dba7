"""Pictures of runs: the fan of what is explored, the losses, and a sweep. Needs matplotlib."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hdet.lab.errors import LabError
from hdet.lab.folder import read, read_lines, reported

# Runs that lie on each other are all to be seen.
_STYLES: list[dict[str, Any]] = [{"linewidth": 3.5, "alpha": 0.5}, {"linewidth": 1.5}, {"linewidth": 1.5, "ls": "--"}]
_SMOOTH = 20  # the running mean of the losses is this part of a run wide


def fan(folder: Path, picture: Path) -> Path | None:
    """The replicas' values, round by round, around the plain schedule; None if nothing fanned out.

    Above as they are, below as multiples of the schedule. One column for each explored hyperparameter.
    """
    rounds = read_lines(folder / "rounds.jsonl")
    if not rounds:
        return None
    names = list(rounds[0]["hyperparameters"])
    plt = _matplotlib()
    figure, axes = plt.subplots(
        2, len(names), figsize=(8 if len(names) == 1 else 4.5 * len(names), 6.5), squeeze=False, sharex=True
    )
    for column, name in enumerate(names):
        _draw_fan(axes[0][column], axes[1][column], rounds, name)
    axes[0][0].set_ylabel(_quantity(names))
    axes[1][0].set_ylabel("multiple of the schedule")
    for axis in axes[1]:
        if axis.get_ylim()[1] > 10:  # a controller that has gone far
            axis.set_yscale("log")
    axes[0][-1].legend(loc="upper right", fontsize="small")
    return _save(figure, picture)


def losses(runs: Sequence[tuple[str, Path]], picture: Path) -> Path:
    """The training losses of some runs, with their labels; a dot at the end is the held-out loss."""
    plt = _matplotlib()
    figure, axis = plt.subplots(figsize=(8, 5))
    for number, (label, folder) in enumerate(runs):
        lines = [line for line in read_lines(folder / "losses.jsonl") if line["loss"] is not None]
        smooth = _running_mean([line["loss"] for line in lines], max(1, len(lines) // _SMOOTH))
        (drawn,) = axis.plot([line["step"] for line in lines], smooth, label=label, **_STYLES[number % 3])
        result = read(folder / "result.json")
        loss = None if result is None else reported(result)["loss"]
        if loss is not None:
            axis.plot([result["steps"]], [loss], "o", color=drawn.get_color(), clip_on=False)
    axis.set_xlabel("step")
    axis.set_ylabel("training loss, running mean (dot: held-out loss at the end)")
    axis.grid(alpha=0.3)
    axis.legend()
    return _save(figure, picture)


def sweep(result: dict[str, Any], picture: Path) -> Path:
    """The held-out loss against the peak learning rate: the mean, and a band from the lowest to the highest seed."""
    plt = _matplotlib()
    rows = [row for row in result["rates"] if row["mean"] is not None and math.isfinite(row["mean"])]
    rates = [row["peak_lr"] for row in rows]
    figure, axis = plt.subplots(figsize=(7, 4.5))
    if len(result["seeds"]) > 1:
        band = [r["min"] for r in rows], [r["max"] for r in rows]
        axis.fill_between(rates, *band, alpha=0.25, label="lowest to highest")
    axis.plot(rates, [r["mean"] for r in rows], "o-", label=_mean_of(len(result["seeds"])))
    axis.axvline(result["best_peak_lr"], color="0.6", linestyle=":", label=f"best: {result['best_peak_lr']:.3g}")
    axis.set_xscale("log")
    axis.set_xlabel("peak learning rate")
    axis.set_ylabel("held-out loss")
    axis.grid(alpha=0.3, which="both")
    axis.legend()
    return _save(figure, picture)


def _draw_fan(above: Any, below: Any, rounds: list[dict[str, Any]], name: str) -> None:
    steps = [record["step"] for record in rounds]
    rows = [record["hyperparameters"][name] for record in rounds]
    for replica in range(max(len(row["values"]) for row in rows)):  # a resumed run may have had another number of them
        values = [row["values"][replica] if replica < len(row["values"]) else math.nan for row in rows]
        relative = [x / row["base"] if row["base"] else math.nan for x, row in zip(values, rows, strict=True)]
        above.plot(steps, values, ".", markersize=4, label=f"replica {replica}" if replica < 8 else None)
        below.plot(steps, relative, ".", markersize=4)
    above.plot(steps, [row["base"] for row in rows], "k--", linewidth=1, label="plain schedule")
    below.axhline(1.0, color="k", linestyle="--", linewidth=1)
    centers = [row["center"] / row["base"] if row["base"] else math.nan for row in rows]
    below.plot(steps, centers, "k-", linewidth=1, label="center")
    below.legend(loc="upper left", fontsize="small")
    above.set_title(name)
    below.set_xlabel("step")
    for axis in (above, below):
        axis.grid(alpha=0.3)


def _quantity(names: Sequence[str]) -> str:
    """What the values of these hyperparameters are, where they are of one kind: "learning_rate/dense" is a rate."""
    kinds = {name.partition("/")[0].replace("_", " ") for name in names}
    return kinds.pop() if len(kinds) == 1 else "value"


def _mean_of(seeds: int) -> str:
    return f"mean of {seeds} seeds" if seeds > 1 else "one seed"


def _running_mean(values: list[float], width: int) -> list[float]:
    """The mean of each value and those before it, `width` in all where there are as many."""
    parts = [values[max(0, i + 1 - width) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def _save(figure: Any, picture: Path) -> Path:
    figure.tight_layout()
    try:
        figure.savefig(picture, dpi=120)
    except OSError as error:
        raise LabError(f"cannot write {picture}: {error.strerror or error}") from error
    _matplotlib().close(figure)
    return picture


def _matplotlib() -> Any:
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ModuleNotFoundError as error:
        raise LabError("pictures need matplotlib, which is not installed: pip install 'hdet[lab]'") from error
