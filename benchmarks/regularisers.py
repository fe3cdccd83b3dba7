"""Weight decay, dropout and label smoothing from wrong starts, judged by a held-out probe, against a sweep of each.

    python benchmarks/regularisers.py weight_decay --task digits --size standard
    python benchmarks/regularisers.py dropout label_smoothing --task digits

Four replicas in one process (plain training of a model without BatchNorm: one). Every run is one line of
benchmarks/results/regularisers.jsonl; a second call runs what is missing there. The probe costs extra and is not
charged here: the question is what is found, not what it costs.

The probe draws from every other held-out sample. All losses here, those of the sweep too, are on the samples in
between, which no run has seen (`held_out_unseen`). A row without that loss is an older one and is run again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "regularisers.jsonl"
# A sweep of each, and the wrong starts: 100 times too low and 10 times too high, as far as there is room.
GRID = {
    "weight_decay": [0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0],
    "dropout": [0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7],
    "label_smoothing": [0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4],
}
WRONG = {"weight_decay": (0.01, 10.0), "dropout": (0.1, 10.0), "label_smoothing": (0.1, 10.0)}
MOST = {"weight_decay": math.inf, "dropout": 0.8, "label_smoothing": 0.8}


def one(run: dict) -> dict:
    os.nice(5)
    import torch  # noqa: PLC0415

    import hdet  # noqa: PLC0415
    from hdet_lab.options import RunOptions  # noqa: PLC0415
    from hdet_lab.train import train  # noqa: PLC0415

    torch.set_num_threads(1)
    method = {"controller": "none"}
    if run["explore"]:
        method = {"controller": "slope", "explore": run["explore"], "gradients": run["gradients"]}
    # plain DDP is one process with the global batch, except for BatchNorm
    size = 1 if not run["explore"] and run["task"] != "digits" else 4
    options = RunOptions(
        run["task"], size=run["size"], seed=run["seed"], replicas=size,
        **{run["what"]: run["start"]}, **method,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        result = hdet.in_process(train, size, options, Path(folder) / "run")[0]
    losses = {name: (result[name] or {}).get("loss") for name in ("held_out", "held_out_unseen")}
    scale = {"scale": result["scales"].get(run["what"]), "scale_step": result["scales_step"]}
    return {**run, **losses, **scale, "seconds": result["seconds"]}


def known() -> dict[str, dict]:
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    return {key(row): row for row in rows if "held_out_unseen" in row}


def key(run: dict) -> str:
    names = ("what", "task", "size", "gradients", "explore", "start", "seed")
    return json.dumps([run[name] for name in names])


def measure(runs: list[dict]) -> list[dict]:
    found = known()
    for run in runs:
        if key(run) not in found:
            row = one(run)
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(*row.values(), flush=True)
            found[key(run)] = row
    return [found[key(run)] for run in runs]


def mean_loss(rows: list[dict]) -> float:
    losses = [row["held_out_unseen"] for row in rows]
    return statistics.fmean(math.inf if loss is None else loss for loss in losses)


def study(what: str, about: dict, seeds: list[int]) -> None:
    """A sweep, then the wrong starts: alone, and for weight decay together with the learning rate."""
    plain = {**about, "what": what, "explore": ""}
    sweep = {x: mean_loss(measure([{**plain, "start": x, "seed": s} for s in seeds])) for x in GRID[what]}
    best = min(sweep, key=sweep.__getitem__)
    print(f"{what}, sweep:", ", ".join(f"{x:g}: {loss:.4f}" for x, loss in sweep.items()), f"best at {best:g}")
    together = [f"{what}=2"] + ([f"learning_rate=1.2,{what}=2"] if what == "weight_decay" else [])
    reference = best or GRID[what][1]
    for wrong in WRONG[what]:
        start = min(reference * wrong, MOST[what])
        ignored = mean_loss(measure([{**plain, "start": start, "seed": s} for s in seeds]))
        print(f"  from {start:g}: left alone {ignored:.4f} ({100 * (ignored / sweep[best] - 1):+.1f} %)")
        for explore in together:
            rows = measure([{**plain, "explore": explore, "start": start, "seed": s} for s in seeds])
            regret = 100 * (mean_loss(rows) / sweep[best] - 1)
            scales = ", ".join(f"{row['scale']:.3g}" for row in rows)
            print(f"  from {start:g}, {explore}: {mean_loss(rows):.4f} ({regret:+.1f} %), scales {scales}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=list(GRID))
    parser.add_argument("--task", default="digits")
    parser.add_argument("--size", default="standard")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    for what in arguments.what:
        gradients = "shared" if what == "weight_decay" else "local"
        about = {"task": arguments.task, "size": arguments.size, "gradients": gradients}
        study(what, about, list(range(arguments.seeds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
