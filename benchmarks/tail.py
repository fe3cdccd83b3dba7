"""What the mean of the last part of a run is worth, against its last weights, and whether a probe can tell.

    python benchmarks/tail.py lab flights sgd --rates 5e-4,3e-3 --seeds 0,2    # a task of the lab at the long size
    python benchmarks/tail.py streams                                          # benchmarks/stream.py and order.py

Plain OneCycleLR at fixed rates. For the mean of the round ends (10 steps) in the last quarter, half and 70 % of a run,
and for half of the way to it: by how much the held-out loss changes, in %, and by how much the loss of a probe of
training data does, with its standard error. Rows go to benchmarks/results/tail.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from order import Days
from stream import Models, Stream, grid, train
from torch import Tensor

RESULTS = Path(__file__).parent / "results" / "tail.jsonl"
PARTS, WAYS = (0.25, 0.5, 0.7), (0.5, 1.0)
INTERVAL, STEPS = 10, 8000
PROBED = 64  # batches of the probe


class Means:
    """The means of tensors over the last parts of a run."""

    def __init__(self, tensors: list[Tensor], steps: int) -> None:
        self.tensors, self.steps = tensors, steps
        self.sums = {part: [torch.zeros_like(t) for t in tensors] for part in PARTS}
        self.counts = dict.fromkeys(PARTS, 0)

    @torch.no_grad()
    def add(self, step: int) -> None:
        for part in PARTS:
            if step > self.steps * (1 - part):
                self.counts[part] += 1
                torch._foreach_add_(self.sums[part], self.tensors)

    @torch.no_grad()
    def ways(self) -> Iterator[str]:
        """Put each average into the tensors, one after another."""
        last = [t.detach().clone() for t in self.tensors]
        for part in PARTS:
            for way in WAYS:
                for tensor, total, end in zip(self.tensors, self.sums[part], last, strict=True):
                    tensor.copy_(end + way * (total / self.counts[part] - end))
                yield f"{way} of {part}"


def lab(name: str, optimizer: str, rate: float, seed: int) -> dict:
    """One run of a task of the lab at the long size."""
    from torch.optim.lr_scheduler import OneCycleLR  # noqa: PLC0415

    from hdet_lab.tasks import TASKS  # noqa: PLC0415

    task = TASKS[name]("long", seed)
    model = task.model()
    steps, stepper = task.steps, task.optimizer(model, rate, optimizer)
    schedule = OneCycleLR(stepper, max_lr=rate, total_steps=steps)
    means = Means(list(model.parameters()), steps)
    for step in range(steps):
        task.loss(model, task.batch(step, 0, 1)).backward()
        stepper.step()
        stepper.zero_grad()
        schedule.step()
        if (step + 1) % INTERVAL == 0:
            means.add(step + 1)
    probe = [batch for index in range(PROBED // 4) for batch in task.probe(index, False)]

    @torch.no_grad()
    def scores() -> list[float]:
        return [task.loss(model, batch).item() for batch in probe]

    return compared(means, lambda: task.evaluate(model)["loss"], scores)


def compared(means: Means, held_out: Callable[[], float], scores: Callable[[], list[float]]) -> dict:
    """By average: the change of the held-out loss, of the probe's loss, and the latter's standard error, in %."""
    last, before = held_out(), scores()
    found: dict[str, list[float]] = {}
    for name in means.ways():
        gains = [100 * (a - b) / statistics.fmean(before) for a, b in zip(scores(), before, strict=True)]
        error = statistics.stdev(gains) / math.sqrt(len(gains))
        found[name] = [round(x, 2) for x in (100 * (held_out() / last - 1), statistics.fmean(gains), error)]
    return {"last": last, **found}


def stream(about: Stream, optimizer: str, seed: int) -> dict:
    """One stream, at rates around its best; the probe is 1,024 fresh samples."""
    rates = grid(optimizer)
    models = Models(rates, optimizer, seed, [1.0] * len(rates))
    means = Means(models.weights, STEPS)
    train(models, about, STEPS, lambda step, start: means.add(step))
    probe = about.batch(7_000_000, 1024)
    last = models.held_out(about)
    with torch.no_grad():
        before = models.losses(models.weights, probe).tolist()
        best = last.index(min(last))
        shown = range(max(0, best - 2), min(len(rates), best + 3))
        found = {}
        for name in means.ways():
            after, probed = models.held_out(about), models.losses(models.weights, probe).tolist()
            found[name] = [
                [round(100 * (new[k] / old[k] - 1), 2) for new, old in ((after, last), (probed, before))] for k in shown
            ]
    return {"best rate": rates[best], "rates": [rates[k] for k in shown], "last": [last[k] for k in shown], **found}


def write(row: dict) -> None:
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=("lab", "streams"))
    parser.add_argument("task", nargs="?", default="flights")
    parser.add_argument("optimizer", nargs="?", default="adamw")
    parser.add_argument("--rates", default="1e-4")
    parser.add_argument("--seeds", default="0")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for seed in map(int, arguments.seeds.split(",")):
        if arguments.study == "lab":
            for rate in map(float, arguments.rates.split(",")):
                about = {"study": arguments.task, "optimizer": arguments.optimizer, "rate": rate, "seed": seed}
                write(about | lab(arguments.task, arguments.optimizer, rate, seed))
            continue
        for optimizer in ("adamw", "sgd"):
            kinds = {"noise 0.5": Stream(0.5, seed), "noise 0.8": Stream(0.8, seed), "days of 40": Days(seed, 40, 1.0)}
            for name, about in kinds.items():
                write({"study": name, "optimizer": optimizer, "seed": seed} | stream(about, optimizer, seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
