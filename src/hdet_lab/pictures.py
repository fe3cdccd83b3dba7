"""Pictures of runs: the fan of what is explored, the losses, and a sweep. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hdet._report.pictures import draw_fan, pyplot
from hdet._report.run import Run
from hdet_lab.errors import LabError, writing
from hdet_lab.folder import full_result, read, read_lines, reported, why_early

# Line styles that keep overlapping runs visible.
_STYLES: list[dict[str, Any]] = [{"linewidth": 3.5, "alpha": 0.5}, {"linewidth": 1.5}, {"linewidth": 1.5, "ls": "--"}]
_SMOOTH = 20  # the running mean of the losses covers 1 / _SMOOTH of a run


def fan(folder: Path, picture: Path) -> Path | None:
    """The replicas' values, round by round, around the plain schedule; None if nothing fanned out."""
    run = Run(folder)
    try:
        run.refresh()
    except OSError as error:
        raise LabError(str(error)) from error
    with _clearly(picture):
        return draw_fan(run, picture)


def losses(runs: Sequence[tuple[str, Path]], picture: Path) -> Path:
    """The training losses of some runs, with their labels; a dot at the end is the held-out loss."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(8, 5))
    for number, (label, folder) in enumerate(runs):
        lines = [line for line in read_lines(folder / "losses.jsonl") if line["loss"] is not None]
        smooth = _running_mean([line["loss"] for line in lines], max(1, len(lines) // _SMOOTH))
        (drawn,) = axis.plot([line["step"] for line in lines], smooth, label=label, **_STYLES[number % 3])
        result = read(folder / "result.json", full_result)
        loss = None if result is None or why_early(result) else reported(result).get("loss")
        if loss is not None:
            axis.plot([result["steps"]], [loss], "o", color=drawn.get_color(), clip_on=False)
    axis.set_xlabel("step")
    axis.set_ylabel("training loss, running mean (dot: held-out loss at the end)")
    axis.grid(alpha=0.3)
    axis.legend()
    return _save(figure, picture)


def sweep(result: dict[str, Any], picture: Path) -> Path:
    """The held-out loss against the peak learning rate: the mean, and a band from the lowest to the highest seed."""
    plt = _pyplot()
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


def _mean_of(seeds: int) -> str:
    return f"mean of {seeds} seeds" if seeds > 1 else "one seed"


def _running_mean(values: list[float], width: int) -> list[float]:
    """The mean of each value and those before it, up to `width` in all."""
    parts = [values[max(0, i + 1 - width) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def _save(figure: Any, picture: Path) -> Path:
    figure.tight_layout()
    with _clearly(picture):
        figure.savefig(picture, dpi=120)
    _pyplot().close(figure)
    return picture


def _pyplot() -> Any:
    with _clearly(Path()):
        return pyplot()


@contextmanager
def _clearly(picture: Path) -> Iterator[None]:
    try:
        with writing(picture):
            yield
    except RuntimeError as error:  # matplotlib is not installed
        raise LabError(str(error)) from error
