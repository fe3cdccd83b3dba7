"""Does the rollback's alarm stay silent at the best fixed rate? Real losses, also at a quarter of the batch.

    python benchmarks/false_alarms.py            # runs what is missing of results/false-alarms.jsonl, then the table
    python benchmarks/false_alarms.py table

One plain run each, in one process, at the best rate of the task's sweep (`quality.py sweep`; of digits with SGD the
rate that benchmarks/finder.py starts from); its losses then go through `Alarm` in rounds of several lengths. The table
has, by interval, the alarms of all seeds and, in brackets, the snapshots that would have been taken.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.optim.lr_scheduler import OneCycleLR

from hdet._phases.rollback.alarm import Alarm
from hdet_lab.tasks import make

RESULTS = Path(__file__).parent / "results" / "false-alarms.jsonl"
BEST = {
    ("flights", "standard", "adamw"): 8e-4, ("flights", "long", "adamw"): 1e-4, ("flights", "long", "sgd"): 5e-4,
    ("digits", "standard", "adamw"): 2e-3, ("digits", "long", "adamw"): 0.256, ("digits", "long", "sgd"): 0.128,
    ("text", "standard", "adamw"): 8e-3, ("text", "long", "adamw"): 4e-3, ("text", "long", "sgd"): 0.256,
}  # fmt: skip
PARTS = (1, 4)  # of the batch: one, and a quarter
SEEDS = {"flights": 3, "digits": 2, "text": 1}  # text takes long
INTERVALS = (1, 5, 10, 40, 100)


def losses_of(name: str, size: str, kind: str, rate: float, part: int, seed: int) -> list[float]:
    task = make(name, size, seed)
    model = task.model()
    optimizer = task.optimizer(model, rate, kind)
    schedule = OneCycleLR(optimizer, max_lr=rate, total_steps=task.steps)
    losses = []
    for step in range(task.steps):
        batch = tuple(tensor[: max(1, len(tensor) // part)] for tensor in task.batch(step))
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses


def verdicts(losses: list[float], interval: int) -> tuple[int, int]:
    alarm = Alarm()
    state = alarm.init()
    seen = []
    for start in range(0, len(losses) - interval + 1, interval):
        part = losses[start : start + interval]
        early = sum(part[: alarm.early]) / alarm.early if interval >= alarm.early else None
        state, verdict = alarm.update(state, sum(part) / interval, interval, early)
        seen.append(verdict)
    return seen.count("alarm"), seen.count("best")


def known() -> list[dict]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def run() -> None:
    """Every run that has no line yet."""
    done = {(row["task"], row["size"], row["optimizer"], row["rate"], row["part"], row["seed"]) for row in known()}
    for seed in range(max(SEEDS.values())):
        for (name, size, kind), rate in BEST.items():
            for part in PARTS:
                if seed >= SEEDS[name] or (name, size, kind, rate, part, seed) in done:
                    continue
                losses = losses_of(name, size, kind, rate, part, seed)
                about = {"task": name, "size": size, "optimizer": kind, "rate": rate, "part": part, "seed": seed}
                row = about | {"verdicts": {t: verdicts(losses, t) for t in INTERVALS}}
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)


def table() -> str:
    lines = ["| task | size | optimizer | rate | batch | seeds | " + " | ".join(f"T={t}" for t in INTERVALS) + " |"]
    lines.append("|---" * (6 + len(INTERVALS)) + "|")
    rows = known()
    for (name, size, kind), rate in BEST.items():
        for part in PARTS:
            about = {"task": name, "size": size, "optimizer": kind, "rate": rate, "part": part}
            mine = [row for row in rows if about.items() <= row.items()]
            if not mine:
                continue
            sums = [[sum(row["verdicts"][str(t)][k] for row in mine) for k in (0, 1)] for t in INTERVALS]
            cells = [name, size, kind, f"{rate:g}", "whole" if part == 1 else f"1/{part}", str(len(mine))]
            lines.append("| " + " | ".join([*cells, *(f"{alarms} ({kept})" for alarms, kept in sums)]) + " |")
    return "\n".join(lines)


def main() -> int:
    torch.set_num_threads(1)
    if sys.argv[1:] != ["table"]:
        run()
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
