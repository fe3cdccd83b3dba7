"""Does the rollback's alarm stay silent at the best fixed rate? Real losses, also at a quarter of the batch.

    python benchmarks/false_alarms.py

One plain run each, in one process; its losses then go through `Alarm` in rounds of several lengths. Prints, by
interval, the alarms and the snapshots that would have been taken.
"""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import OneCycleLR

from hdet.lab.tasks import make
from hdet.rollback.rollback import Alarm

RUNS = [
    ("flights", "long", "adamw", 1e-4, 1),
    ("flights", "long", "adamw", 1e-4, 4),
    ("flights", "long", "sgd", 4e-3, 1),
    ("flights", "long", "sgd", 4e-3, 4),
    ("digits", "long", "adamw", 8e-3, 4),
    ("digits", "standard", "adamw", 1e-2, 1),
    ("text", "standard", "adamw", 1e-2, 4),
]
INTERVALS = (1, 5, 10, 40, 100)


def losses_of(name: str, size: str, kind: str, rate: float, part: int) -> list[float]:
    task = make(name, size, 0)
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
        state, verdict = alarm.update(state, sum(losses[start : start + interval]) / interval, interval)
        seen.append(verdict)
    return seen.count("alarm"), seen.count("best")


def main() -> None:
    torch.set_num_threads(1)
    print("| task | size | optimizer | batch | " + " | ".join(f"T={t}" for t in INTERVALS) + " |")
    print("|---|---|---|---|" + "---|" * len(INTERVALS))
    for name, size, kind, rate, part in RUNS:
        losses = losses_of(name, size, kind, rate, part)
        cells = [f"{alarms} ({kept})" for alarms, kept in (verdicts(losses, t) for t in INTERVALS)]
        batch = "whole" if part == 1 else f"1/{part}"
        print(f"| {name} | {size} | {kind} | {batch} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
