"""What find_lr makes of data in the order of time, where neighbouring batches are alike.

    python benchmarks/order.py days       # a stream whose labels change from day to day, against a sweep
    python benchmarks/order.py flights    # how alike neighbours are, and ramps in order and shuffled

`likeness` is 1 + 2 sum_k c_k, with the correlations c_k of gradients k batches apart at the initial weights: 1 where
batches are independent; the noise of a long run is so many times that of as many independent ones. "in order" hands
find_lr the first batches of the run, as they come; "shuffled" hands it batches from all over the run. Rows go to
benchmarks/results/order.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from stream import CLASSES, FEATURES, Models, Stream, grid, student, train
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hdet

RESULTS = Path(__file__).parent / "results" / "order.jsonl"
STEPS = 8000
SEEN = 428  # batches that find_lr asks for
PROJECTIONS = 64  # of the gradients, random ones
BEST = {"adamw": 1e-4, "sgd": 5e-4}  # on flights at the long size: `quality.py sweep`
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, 3e-3, weight_decay=0.0),
    "sgd": lambda p: torch.optim.SGD(p, 0.05, 0.9),
}


class Days(Stream):
    """A stream whose labels lean to other classes on each day of `day` batches; held-out samples have a day each."""

    def __init__(self, seed: int, day: int, strength: float) -> None:
        super().__init__(0.0, seed)
        self.day, self.strength = day, strength

    def batch(self, index: int, size: int | None = None) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 10**7 + index + 1)
        n = size or self.size
        x = torch.randn(n, FEATURES, generator=generator)
        if index < STEPS:
            today = torch.Generator().manual_seed(self.seed * 10**6 + 7 + index // self.day)
            lean = torch.randn(CLASSES, generator=today)
        else:
            lean = torch.randn(n, CLASSES, generator=generator)
        logits = torch.tanh(2 * x @ self.first) @ self.second
        return x, (logits + self.strength * lean).argmax(1)


def likeness(model: nn.Module, loss_of: Callable[[int], Tensor]) -> float:
    """1 + 2 sum_k c_k of the gradients, summed until k is 4 times the sum so far."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    directions = torch.randn(
        PROJECTIONS, sum(p.numel() for p in parameters), generator=torch.Generator().manual_seed(0)
    )
    rows = []
    for index in range(SEEN):
        gradients = torch.autograd.grad(loss_of(index), parameters)
        rows.append(directions @ torch.cat([g.flatten() for g in gradients]))
    seen = torch.stack(rows)
    seen = seen - seen.mean(0)
    total, k = 1.0, 0
    while k < 4 * total and k < SEEN // 2:
        k += 1
        total += 2 * float((seen[:-k] * seen[k:]).mean() / seen.square().mean())
    return max(total, 1.0)


def orders(steps: int) -> dict[str, Callable[[int], int]]:
    """Which batch of the run find_lr is handed."""
    shuffled = torch.randperm(SEEN, generator=torch.Generator().manual_seed(1)).tolist()
    return {"in order": lambda i: i, "shuffled": lambda i: shuffled[i % SEEN] * steps // SEEN}


def found(make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]], loss: Any, batch: Any, probe: Any, steps: int,
          best: float) -> dict[str, Any]:  # fmt: skip
    """By order: hi and the answer in multiples of the best rate, and hi / lo; or that there is none."""
    told: dict[str, Any] = {}
    for name, index in orders(steps).items():
        model, optimizer = make()

        def step(i: int, model: nn.Module = model, index: Callable[[int], int] = index) -> None:
            loss(model, batch(index(i))).backward()

        try:
            answer = hdet.find_lr(model, optimizer, step, probe=probe, total_steps=steps)
        except hdet.FindLRError as error:
            told[name] = {"error": str(error)}
            continue
        low, high = answer.interval
        told[name] = {
            "hi": round(high / best, 2),
            "hi / lo": round(high / low, 2),
            "rate": round(answer.rate / best, 2),
        }
    return told


def days(day: int, strength: float, optimizer: str, seed: int) -> dict[str, Any]:
    """The sweep of one stream, and what find_lr says."""
    stream, rates = Days(seed, day, strength), grid(optimizer)
    models = Models(rates, optimizer, seed, [1.0] * len(rates))
    train(models, stream, STEPS, lambda step, start: None)
    losses = models.held_out(stream)
    best = rates[losses.index(min(losses))]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = student(seed)
        return model, OPTIMIZERS[optimizer](model.parameters())

    probe = hdet.Probe(lambda index: [stream.batch(5_000_000 + k) for k in range(4)], loss)
    model = student(seed)
    alike = likeness(model, lambda i: loss(model, stream.batch(i)))
    near = [rate / best for rate, value in zip(rates, losses, strict=True) if value < 1.01 * min(losses)]
    about = {"best rate": best, "within 1 %": [near[0], near[-1]], "likeness": round(alike, 1), "losses": losses}
    return about | found(make, loss, stream.batch, probe, STEPS, best)


def flights(optimizer: str, seed: int, probes: int) -> dict[str, Any]:
    """The long size; `probes` global batches times 4 to score on."""
    from hdet_lab.tasks import TASKS  # noqa: PLC0415

    task = TASKS["flights"]("long", seed)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = task.model()
        return model, task.optimizer(model, BEST[optimizer], optimizer)

    probe = hdet.Probe(lambda index: [b for k in range(probes) for b in task.probe(index + k)], task.loss)
    model = task.model()
    about = {"likeness": round(likeness(model, lambda i: task.loss(model, task.batch(i))), 1)}
    return about | found(make, task.loss, task.batch, probe, task.steps, BEST[optimizer])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("days", "flights"))
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--days", default="1,10,40", help="batches in a day")
    parser.add_argument("--strength", type=float, default=0.5, help="of a day's leaning")
    parser.add_argument("--probes", default="1,16", help="flights: probes of 4 global batches")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    for seed in seeds:
        for optimizer in OPTIMIZERS:
            for size in map(int, (arguments.days if arguments.what == "days" else arguments.probes).split(",")):
                about: dict[str, Any] = {"study": arguments.what, "optimizer": optimizer, "seed": seed}
                if arguments.what == "days":
                    about |= {"day": size, "strength": arguments.strength}
                    row = about | days(size, arguments.strength, optimizer, seed)
                else:
                    row = about | {"probes": size} | flights(optimizer, seed, size)
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps({key: value for key, value in row.items() if key != "losses"}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
