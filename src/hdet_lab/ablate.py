"""`hdet ablate`: the paper's ablation on a task of the lab. How much does each part help at a rate that is too high?

All rows start from the same trained weights, those of a short plain run at the low rate, so that rows with a warm
initialisation differ from the others only in its noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hdet_lab.errors import OptionError
from hdet_lab.folder import read_lines
from hdet_lab.many_runs import held_out_loss, mean, open_experiment, over_seeds, run_all, run_all_to_the_end
from hdet_lab.options import GRADIENTS, RunOptions
from hdet_lab.tables import number, table
from hdet_lab.worker import Job

NOISE = 0.01
"""The paper's, relative to the weights."""
CONTROLLERS = ("softmax", "auto")
_WARM_PART = 4  # the warm-up run has 1 / _WARM_PART of a run's steps
_WARM_SEED = 1000  # added to the seed, for other batches
_RATIO, _MOST_FACTORS = 3.0, 10  # the grid to search for a rate that is too high
_GIVEN_BACK = 0.5  # plain training has broken down once it loses this part of the low rate's gain over the marginals
# The paper's training losses: 3.294 at the low rate, then in % of that.
_PAPER = {
    "baseline, low": 0.0, "baseline, high": 26.6, "warm init only": 41.9,
    "without auto-LR": -0.43, "without warm init": -0.39, "full": -0.52,
}  # fmt: skip


class _Row(NamedTuple):
    name: str
    controller: str
    gradients: str
    low: bool
    noise: bool


def ablate(
    options: RunOptions,
    folder: Path,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    high_lr: float | None = None,
    noise: float = NOISE,
    controllers: Sequence[str] = CONTROLLERS,
    gradients: Sequence[str] = GRADIENTS,
    one_process: Callable[[int], bool] = lambda size: False,
) -> dict[str, Any]:
    """Train every row with every seed; return the content of ablate.json. A second call continues a stopped one.

    Args:
        options: the plain run at the low rate, its own or its task's.
        folder: output folder; one subfolder per run.
        seeds: the same for every row.
        high_lr: the high rate; None to use the first of 3, 9, 27... times the low one at which plain training, with
            the first seed, loses half of its gain over predicting the frequencies of the labels.
        noise: noise of the warm initialisation.
        controllers: the controllers to use as auto-LR.
        gradients: "shared", "local" or both.
        one_process: whether that many replicas run in one process.

    Raises:
        LabError: for options or a folder that cannot work.
    """
    _check(controllers, gradients)
    low_lr = options.peak_lr_of(options.make_task())
    kinds = {"controllers": list(controllers), "gradients": list(gradients)}
    about = {"options": options.to_json(), "seeds": list(seeds), "asked_high_lr": high_lr, "noise": noise, **kinds}
    files = open_experiment(folder, "ablate.json", about)
    warm = [_warm(options.replace(peak_lr=low_lr, seed=seed), folder) for seed in seeds]
    run_all(warm, one_process)
    begun = [options.replace(seed=seed, start=job.folder) for seed, job in zip(seeds, warm, strict=True)]

    def measure(rate: float) -> tuple[float, float]:
        result = run_all([_job(begun[0], folder, rate)], one_process)[0]
        return held_out_loss(result, unseen=False), result["marginal_loss"]

    if high_lr is None:
        high_lr = breaking_rate(low_lr, measure)
    rows = []
    for row in _rows(controllers, gradients):
        rate = low_lr if row.low else high_lr
        jobs = [_job(_options(row, one, noise), folder, rate) for one in begun]
        results = run_all_to_the_end(jobs, one_process)
        measured = {
            "losses": [held_out_loss(result, unseen=False) for result in results],
            "train_losses": [result["train_loss"] for result in results],
            "seconds": mean([result["seconds"] for result in results]),
            "no_rate": sum("no_rate" in result for result in results),
            "groups": scales_by_group([Path(job.folder) for job in jobs]),
        }
        rows.append({**row._asdict(), "peak_lr": rate, **measured})
    result = {**about, "low_lr": low_lr, "high_lr": high_lr, "rows": rows}
    files.write("ablate.json", result)
    return result


def show(result: dict[str, Any]) -> str:
    """The table, the paper's figures, and the scales of each parameter group."""
    rows = result["rows"]
    low = mean([_finite(x) for x in rows[0]["losses"]])
    lines = []
    for row in rows:
        losses = [_finite(x) for x in row["losses"]]
        change = f"{100 * (mean(losses) / low - 1):+.2f}"
        cells = [row["name"], _method(row), f"{row['peak_lr']:.2g}", number(mean(losses))]
        cells += [f"{number(min(losses))}..{number(max(losses))}", change, f"{_PAPER[row['name']]:+.2f}"]
        if row["no_rate"]:
            cells[3:6] = ["no rate found", f"{row['no_rate']} of {len(losses)} seeds", "-"]
        lines.append([*cells, number(mean([_finite(x) for x in row["train_losses"]])), f"{row['seconds']:.0f}"])
    header = ["row", "method", "rate", "held-out loss", "min..max", "over low, %", "paper's", "train loss", "seconds"]
    seeds = over_seeds(len(result["seeds"])).capitalize()
    said = (
        f"{seeds}. All rows begin with the same weights, of a plain run a quarter as "
        f"long;\na warm init adds noise of {result['noise']:g}. The runs with auto are shortened by what they cost. "
        "With a warm\ninit only, and with auto and shared gradients, nothing averages the replicas: the losses are the "
        "first one's.\nThe paper's figures are of training losses."
    )
    return f"{table(header, lines)}\n\n{said}{_shown_groups(result)}"


def _shown_groups(result: dict[str, Any]) -> str:
    """The factors on the schedule that the softmax controller found, by parameter group, slowest decay last."""
    text = ""
    for row in result["rows"]:
        if row["name"] == "full" and row["groups"]:
            names = sorted(row["groups"], key=lambda name: row["groups"][name]["tenth"])
            cells = [[name, *(f"{row['groups'][name][part]:.3f}" for part in ("half", "tenth"))] for name in names]
            shown = table(["factor on the schedule", "at half", "at a tenth"], cells)
            text += f"\n\nParameter groups, {_method(row)}; the fastest decay first\n{shown}"
    if text:
        text += '\n\nAt half and at a tenth of the peak. The paper: dense layers decay fastest, "no_decay" slowest.'
    return text


def _method(row: dict[str, Any]) -> str:
    return "plain" if row["controller"] == "none" else f"{row['controller']}, {row['gradients']}"


def _finite(value: float | None) -> float:
    return float("inf") if value is None else value


def _rows(controllers: Sequence[str], gradients: Sequence[str]) -> list[_Row]:
    rows = [
        _Row("baseline, low", "none", "shared", low=True, noise=False),
        _Row("baseline, high", "none", "shared", low=False, noise=False),
        _Row("warm init only", "none", "shared", low=False, noise=True),
    ]
    for kind in gradients:
        rows.append(_Row("without auto-LR", "fixed", kind, low=False, noise=True))
        for controller in controllers:
            rows.append(_Row("without warm init", controller, kind, low=False, noise=False))
            rows.append(_Row("full", controller, kind, low=False, noise=True))
    return rows


def _options(row: _Row, begun: RunOptions, noise: float) -> RunOptions:
    """The options of a row. As in the paper, the paper's rows explore each parameter group on its own."""
    changes: dict[str, Any] = {"controller": row.controller, "warm_noise": noise if row.noise else 0.0}
    if row.controller != "none":
        changes["gradients"] = row.gradients
    if row.controller in ("fixed", "softmax"):
        changes["per_group"] = True
    if row.controller == "auto":
        changes["charge"] = True
    return begun.replace(**changes)


def _warm(options: RunOptions, folder: Path) -> Job:
    steps = max(1, options.make_task().steps // _WARM_PART)
    return Job(options.replace(seed=options.seed + _WARM_SEED, steps=steps), str(folder / f"warm-seed-{options.seed}"))


def _job(options: RunOptions, folder: Path, rate: float) -> Job:
    noise = "-warm" if options.warm_noise else ""
    name = f"{options.controller}-{options.gradients}{noise}-lr-{rate:.6g}-seed-{options.seed}"
    return Job(options.replace(peak_lr=rate), str(folder / name))


def breaking_rate(low_lr: float, measure: Callable[[float], tuple[float, float]]) -> float:
    """The first rate at which plain training breaks down; `measure` returns its loss and that of the marginals."""
    low, marginal = measure(low_lr)
    for k in range(1, _MOST_FACTORS + 1):
        rate = float(f"{low_lr * _RATIO**k:.6g}")
        if not measure(rate)[0] < low + _GIVEN_BACK * (marginal - low):
            return rate
    raise OptionError(f"high_lr was not found: plain training works at all rates up to {rate:g}; give one")


def scales_by_group(folders: Sequence[Path]) -> dict[str, dict[str, float]]:
    """The scale of each parameter group's rate when the schedule was last at half and at a tenth of its peak."""
    found: dict[str, dict[str, list[float]]] = {}
    for folder in folders:
        rounds = read_lines(folder / "rounds.jsonl")
        names = [name for name in (rounds[0]["hyperparameters"] if rounds else {}) if "learning_rate/" in name]
        for name in names:
            rows = [record["hyperparameters"][name] for record in rounds]
            peak = max(row["base"] for row in rows)
            for part, share in (("half", 0.5), ("tenth", 0.1)):
                scale = [row["scale"] for row in rows if row["base"] >= share * peak][-1]
                found.setdefault(name.partition("/")[2], {}).setdefault(part, []).append(scale)
    return {name: {part: mean(scales) for part, scales in parts.items()} for name, parts in found.items()}


def _check(controllers: Sequence[str], gradients: Sequence[str]) -> None:
    for name, chosen, known in (("controllers", controllers, CONTROLLERS), ("gradients", gradients, GRADIENTS)):
        if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(known):
            raise OptionError(f"{name} must be of {','.join(known)}, each once; got {','.join(chosen)!r}")
