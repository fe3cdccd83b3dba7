"""`hdet returns`: the benefit of more replicas. The same run, at the same global batch, with 2, 4, 8 and 16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hdet_lab.errors import OptionError
from hdet_lab.many_runs import held_out_loss, mean, open_experiment, over_seeds, run_all, what_is_held_out
from hdet_lab.options import RunOptions
from hdet_lab.tables import number, table
from hdet_lab.worker import Job

SIZES = (2, 4, 8, 16)


def scale_replicas(
    options: RunOptions,
    folder: Path,
    *,
    sizes: Sequence[int] = SIZES,
    seeds: Sequence[int] = (0,),
    one_process: Callable[[int], bool] = lambda size: False,
) -> dict[str, Any]:
    """Train with each number of replicas, plain and with the controller; return the content of returns.json.

    A second call continues a stopped one. Losses are on all held-out samples or, if the controller has a held-out
    probe, in all rows on the half that the probe does not draw from.

    Raises:
        LabError: for options or a folder that cannot work.
    """
    _check(sizes)
    for size in sizes:
        options.replace(replicas=size).make_task()
    about = {"options": options.to_json(), "sizes": list(sizes), "seeds": list(seeds)}
    files = open_experiment(folder, "returns.json", about)
    methods = list(dict.fromkeys(("none", options.controller)))
    rows = []
    for size in sizes:
        for method in methods:
            kind = options.plain() if method == "none" else options
            jobs = [_job(kind.replace(replicas=size, seed=s), folder) for s in seeds]
            results = run_all(jobs, one_process)
            losses = [held_out_loss(result, options.probes_held_out) for result in results]
            seconds = mean([result["seconds"] for result in results])
            rows.append({"replicas": size, "controller": method, "losses": losses, "seconds": seconds})
    result = {**about, "rows": rows}
    files.write("returns.json", result)
    return result


def show(result: dict[str, Any]) -> str:
    """The table: a line for each number of replicas and method."""
    plain = {row["replicas"]: mean(row["losses"]) for row in result["rows"] if row["controller"] == "none"}
    rows = []
    for row in result["rows"]:
        loss, name = mean(row["losses"]), "plain" if row["controller"] == "none" else row["controller"]
        change = "" if name == "plain" else f"{loss - plain[row['replicas']]:+.4f}"
        lowest, highest = number(min(row["losses"])), number(max(row["losses"]))
        spread = f"{lowest}..{highest}" if len(row["losses"]) > 1 else "-"
        rows.append([str(row["replicas"]), name, number(loss), spread, change, f"{row['seconds']:.1f}"])
    text = table(["replicas", "method", "held-out loss", "min..max", "against plain", "seconds"], rows)
    said = over_seeds(len(result["seeds"]))
    return f"{text}\n\nThe same global batch in every row; {said}.\n{what_is_held_out(result)}"


def _check(sizes: Sequence[int]) -> None:
    if not sizes or len(set(sizes)) < len(sizes):
        raise OptionError(f"sizes must be different numbers of replicas, such as 2,4; got {','.join(map(str, sizes))}")


def _job(options: RunOptions, folder: Path) -> Job:
    return Job(options, str(folder / f"{options.replicas}-{options.controller}-seed-{options.seed}"))
