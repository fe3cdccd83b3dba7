"""Local gradients and an outer optimizer beside DDP: held-out loss at equal steps, and bytes on the wire per step.

The lab's task `text` with AdamW under OneCycleLR, on processes of this machine over gloo. Bytes are those of the
loopback device in a network namespace of our own, so that everything is counted and nothing else is: DDP's broadcast
of the first weights, its gradients, our averages and small vectors, the store, the meter's loss.

    python benchmarks/local.py --replicas 4 --steps 2000 --seeds 2     # adds lines to benchmarks/results/local.jsonl
    python benchmarks/local.py --table                                 # writes benchmarks/results/local-DATE.md
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from hdet_lab.launch import launch, prepare
from hdet_lab.options import RunOptions
from hdet_lab.worker import Job

RESULTS = Path(__file__).parent / "results"
OURS = "HDET_NAMESPACE"
LOCAL: dict[str, Any] = {"controller": "fixed", "spread": 0.0, "gradients": "local"}
METHODS: dict[str, dict[str, Any]] = {
    "DDP": {"controller": "none"},
    "average every 200": {**LOCAL, "interval": 200},
    "average every 200, own state": {**LOCAL, "interval": 200, "average_state": False},
    "Nesterov(0.7, 0.9) every 200": {**LOCAL, "interval": 200, "average_state": False, "outer_momentum": 0.9},
    "Nesterov(0.7, 0.5) every 200": {**LOCAL, "interval": 200, "average_state": False, "outer_momentum": 0.5},
    "Nesterov(0.7, 0.9) every 50": {**LOCAL, "interval": 50, "average_state": False, "outer_momentum": 0.9},
    "Nesterov(0.7, 0.5) every 50": {**LOCAL, "interval": 50, "average_state": False, "outer_momentum": 0.5},
}


def sent() -> int:
    """Bytes that have gone through the loopback device."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    counters = next(line.split(":")[1].split() for line in lines if line.strip().startswith("lo:"))
    return int(counters[8])


def own_namespace(argv: list[str]) -> int:
    """This script again, where nobody else uses the loopback device."""
    command = "ip link set lo up && exec " + " ".join([sys.executable, *map(repr, [__file__, *argv])])
    return subprocess.run(
        ["unshare", "-rn", "sh", "-c", command], env={**os.environ, OURS: "1"}, check=False
    ).returncode


def measure(method: str, replicas: int, steps: int, seed: int) -> dict[str, Any]:
    options = RunOptions("text", replicas=replicas, steps=steps, seed=seed, **METHODS[method])
    with tempfile.TemporaryDirectory() as folder:
        before = sent()
        launch([Job(options, f"{folder}/run")])
        traffic = sent() - before
        result = json.loads(Path(folder, "run", "result.json").read_text())
    about = {"method": method, "replicas": replicas, "steps": steps, "seed": seed}
    return {
        **about,
        "loss": result["held_out"]["loss"],
        "bytes_per_step": traffic / steps,
        "seconds": result["seconds"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    date = datetime.date.today().isoformat()
    lines = [
        f"# Local gradients, {date}",
        "",
        f"`benchmarks/local.py`; torch {torch.__version__}, Python {platform.python_version()}, gloo on loopback, "
        f"{os.cpu_count()} cores. Task `text`, 32 samples in a global batch. Losses: held out, mean over the seeds "
        "(lowest to highest). Bytes: all that went over the loopback device in the run, divided by its steps.",
    ]
    runs = defaultdict(lambda: defaultdict(list))
    for row in rows:
        runs[row["replicas"], row["steps"]][row["method"]].append(row)
    for (replicas, steps), methods in sorted(runs.items()):
        lines += [
            "",
            f"## {replicas} replicas, {steps} steps",
            "",
            "| method | held-out loss | MB per step | of DDP's |",
        ]
        lines.append("|---|---|---|---|")
        ddp = statistics.mean(row["bytes_per_step"] for row in methods["DDP"])
        for method, found in methods.items():
            losses = [row["loss"] for row in found]
            traffic = statistics.mean(row["bytes_per_step"] for row in found)
            span = f" ({min(losses):.4f} to {max(losses):.4f})" if len(losses) > 1 else ""
            part = "1" if method == "DDP" else f"1/{ddp / traffic:.0f}"
            lines.append(f"| {method} | {statistics.mean(losses):.4f}{span} | {traffic / 1e6:.4f} | {part} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--method", choices=METHODS, action="append", help="default: all")
    parser.add_argument("--results", type=Path, default=RESULTS / "local.jsonl")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.table:
        text = table([json.loads(line) for line in arguments.results.read_text().splitlines()])
        (RESULTS / f"local-{datetime.date.today().isoformat()}.md").write_text(text)
        print(text)
        return 0
    if OURS not in os.environ:
        return own_namespace(sys.argv[1:])
    prepare()
    for seed in range(arguments.seeds):
        for method in arguments.method or METHODS:
            row = measure(method, arguments.replicas, arguments.steps, seed)
            with arguments.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
