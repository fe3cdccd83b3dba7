"""Where a signal for the learning rate can be looked for cheaply: a stream of samples with label noise.

    python benchmarks/stream.py factor      # find_lr's interval against the best rate of a sweep
    python benchmarks/stream.py widths      # from these rows: what narrow intervals are to be counted as
    python benchmarks/stream.py signals     # three signals within the run, at fixed rates from far too low to too high
    python benchmarks/stream.py distance    # a rate that follows the distance travelled, from many starts

A teacher network labels fresh Gaussian samples, a share `rho` of the labels is replaced by random ones, and a student
of three layers is trained by OneCycleLR's curve. All rates of a sweep are trained at once, as one batched model: 8,000
steps of 26 models take about a minute on one core. Rows go to benchmarks/results/stream.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

import hdet
from hdet._find_lr.decisions import Fine, default_factor

RESULTS = Path(__file__).parent / "results" / "stream.jsonl"
FEATURES, HIDDEN, CLASSES = 32, 64, 10
CENTERS = {"adamw": 3e-3, "sgd": 0.05}  # of the grid of rates, ratio 2, 8 below and 4 above
INTERVAL = 10


class Stream:
    """Batch `index` of a task that never repeats itself."""

    def __init__(self, rho: float, seed: int, batch: int = 32) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rho, self.seed, self.size = rho, seed, batch
        self.first = torch.randn(FEATURES, 64, generator=generator) / math.sqrt(FEATURES)
        self.second = torch.randn(64, CLASSES, generator=generator) / 8

    def batch(self, index: int, size: int | None = None) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 10**7 + index + 1)
        n = size or self.size
        x = torch.randn(n, FEATURES, generator=generator)
        labels = (torch.tanh(2 * x @ self.first) @ self.second).argmax(1)
        wrong = torch.rand(n, generator=generator) < self.rho
        return x, torch.where(wrong, torch.randint(0, CLASSES, (n,), generator=generator), labels)

    def held_out(self) -> tuple[Tensor, Tensor]:
        return self.batch(9_000_000, 8192)


def student(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = (nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    return nn.Sequential(*layers)


def one_cycle(step: int, steps: int) -> float:
    """OneCycleLR's curve with its defaults, its peak 1."""
    peak = 0.3 * steps - 1
    start, end, part = (1 / 25, 1.0, step / peak) if step <= peak else (1.0, 4e-6, (step - peak) / (steps - 1 - peak))
    return end + (start - end) / 2 * (1 + math.cos(math.pi * part))


class Models:
    """Many students, each with its own rate, trained on the same batches as one batched model."""

    def __init__(self, rates: list[float], optimizer: str, seed: int, outer: list[float]) -> None:
        self.rates, self.outer, self.adam = torch.tensor(rates), torch.tensor(outer), optimizer == "adamw"
        self.weights = [p.detach().expand(len(rates), *p.shape).clone() for p in student(seed).parameters()]
        self.first = [torch.zeros_like(w) for w in self.weights]
        self.second = [torch.zeros_like(w) for w in self.weights]
        self.steps = 0

    def outputs(self, weights: list[Tensor], x: Tensor) -> Tensor:
        hidden = x.expand(len(self.rates), *x.shape)
        for k in range(0, 6, 2):
            hidden = torch.baddbmm(weights[k + 1].unsqueeze(1), hidden, weights[k].transpose(1, 2))
            hidden = relu(hidden) if k < 4 else hidden
        return hidden

    def losses(self, weights: list[Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        outputs = self.outputs(weights, batch[0])
        every = cross_entropy(outputs.flatten(0, 1), batch[1].repeat(len(self.rates)), reduction="none")
        return every.view(len(self.rates), -1).mean(1)

    def step(self, batch: tuple[Tensor, Tensor], rates: Tensor) -> None:
        leaves = [w.requires_grad_() for w in self.weights]
        gradients = torch.autograd.grad(self.losses(leaves, batch).sum(), leaves)
        self.steps += 1
        for w, g, m, v in zip(self.weights, gradients, self.first, self.second, strict=True):
            w.requires_grad_(False)
            if self.adam:
                m.mul_(0.9).add_(g, alpha=0.1)
                v.mul_(0.999).addcmul_(g, g, value=0.001)
                update = m / (1 - 0.9**self.steps) / ((v / (1 - 0.999**self.steps)).sqrt() + 1e-8)
            else:
                update = m.mul_(0.9).add_(g)
            w.sub_(_each(rates, w) * update).nan_to_num_(0, 0, 0)

    @torch.no_grad()
    def held_out(self, stream: Stream) -> list[float]:
        return [float(loss) for loss in self.losses(self.weights, stream.held_out())]


def _each(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.dim() - 1))


def norm(tensors: list[Tensor]) -> Tensor:
    """Each model's norm."""
    return sum((t.flatten(1).square().sum(1) for t in tensors), torch.zeros(())).sqrt()


def product(left: list[Tensor], right: list[Tensor]) -> Tensor:
    return sum(((a * b).flatten(1).sum(1) for a, b in zip(left, right, strict=True)), torch.zeros(()))


def train(models: Models, stream: Stream, steps: int, on_round: Callable[[int, list[Tensor]], Tensor | None]) -> None:
    """OneCycleLR's curve; every 10 steps the outer step and `on_round(step, start)`, which may give new rates."""
    start = [w.clone() for w in models.weights]
    for step in range(steps):
        models.step(stream.batch(step), models.rates * one_cycle(step, steps))
        if (step + 1) % INTERVAL == 0 and step + 1 < steps:
            for w, s in zip(models.weights, start, strict=True):
                w.copy_(s + _each(models.outer, w) * (w - s))
            rates = on_round(step + 1, start)
            models.rates = models.rates if rates is None else rates
            start = [w.clone() for w in models.weights]


def grid(optimizer: str) -> list[float]:
    return [CENTERS[optimizer] * 2.0**k for k in range(-8, 5)]


def at(rates: list[float], losses: list[float], rate: float) -> float:
    """The loss at a rate between those of a sweep."""
    position = math.log2(rate / rates[0])
    k = max(0, min(len(rates) - 2, int(position)))
    return losses[k] + (losses[k + 1] - losses[k]) * (position - k)


def factor(stream: Stream, optimizer: str, seed: int, steps: int) -> dict:
    """The sweep, without and with an outer step of 1/2, and what find_lr says."""
    rates = grid(optimizer)
    models = Models(rates * 2, optimizer, seed, [1.0] * len(rates) + [0.5] * len(rates))
    train(models, stream, steps, lambda step, start: None)
    losses = models.held_out(stream)
    plain, outer = losses[: len(rates)], losses[len(rates) :]
    model = student(seed)
    make = {
        "adamw": lambda p: torch.optim.AdamW(p, 3e-3, weight_decay=0.0),
        "sgd": lambda p: torch.optim.SGD(p, 0.05, 0.9),
    }

    def loss_fn(model, batch):
        return cross_entropy(model(batch[0]), batch[1])

    probe = hdet.Probe(lambda index: [stream.batch(5_000_000 + k) for k in range(4)], loss_fn)
    best = min(plain)
    swept = {"best rate": rates[plain.index(best)], "losses": plain, "losses, outer 1/2": outer}
    try:
        found = hdet.find_lr(
            model, make[optimizer](model.parameters()), lambda i: loss_fn(model, stream.batch(i)).backward(),
            probe=probe, total_steps=steps,
        )  # fmt: skip
    except hdet.FindLRError as error:
        return {**swept, "error": str(error)}
    low, high = found.interval
    middle = math.sqrt(low * high)
    regret = {
        name: {f: round(100 * (at(rates, row, f * middle) / best - 1), 2) for f in (2, 1.5, 1, 0.75, 0.5, 0.35, 0.25)}
        for name, row in (("plain", plain), ("outer 1/2", outer))
    }
    drop = 1 - min(loss for _, loss in found.fine) / found.first_loss
    return {
        **swept, "best rate, outer 1/2": rates[outer.index(min(outer))], "middle": middle, "interval": [low, high],
        "rose": high < found.fine[-1][0],
        "drop": round(drop, 3), "regret by factor": regret,
    }  # fmt: skip


def signals(stream: Stream, optimizer: str, seed: int, steps: int) -> dict:
    """At which rate, as a multiple of the sweep's best, each signal changes its sign, at several times of the run.

    lag: the mean of the last weights (an exponential one over a tenth of the steps so far) against the last weights
    themselves, by their loss on 1,024 fresh samples: worse than they if the rate is low and it lags behind, better if
    it is high and takes the noise out. turn: the cosine between the displacements of two neighbouring rounds, summed
    over the last tenth. vertex: where the loss is lowest along the round's displacement D, from the losses at its
    start, end and middle: R - 1/2.
    """
    rates = grid(optimizer)
    models = Models(rates, optimizer, seed, [1.0] * len(rates))
    times = {round(part * steps / INTERVAL) * INTERVAL: part for part in (0.1, 0.2, 0.3, 0.5, 0.7)}
    mean = [w.clone() for w in models.weights]
    turn, vertex, before = torch.zeros(len(rates)), torch.zeros(2, len(rates)), None
    crossings: dict[str, dict[float, float | None]] = {"lag": {}, "turn": {}, "vertex": {}}

    @torch.no_grad()
    def look(step: int, start: list[Tensor]) -> None:
        nonlocal before
        keep = 1 - INTERVAL / max(step / 10, INTERVAL)
        displacement = [w - s for w, s in zip(models.weights, start, strict=True)]
        for m, w in zip(mean, models.weights, strict=True):
            m.lerp_(w, 1 - keep)
        if before is not None:
            turn.mul_(keep).add_(product(before, displacement) / (norm(before) * norm(displacement)), alpha=1 - keep)
        before = displacement
        probe = stream.batch(7_000_000 + step, 1024)
        at_start, at_end = models.losses(start, probe), models.losses(models.weights, probe)
        half = models.losses([(s + w) / 2 for s, w in zip(start, models.weights, strict=True)], probe)
        curvature = 2 * (at_start + at_end - 2 * half)
        vertex.mul_(keep).add_(torch.stack([at_end - at_start - curvature, curvature]), alpha=1 - keep)
        if step in times:
            lag = models.losses(models.weights, probe) - models.losses(mean, probe)
            ratio = -vertex[0] / (2 * vertex[1])
            here = {
                "lag": lag,
                "turn": -turn,
                "vertex": 0.5 - torch.where(vertex[1] > 0, ratio, torch.full_like(ratio, 9.0)),
            }
            for name, values in here.items():
                crossings[name][times[step]] = _crossing(rates, values.tolist())

    train(models, stream, steps, look)
    losses = models.held_out(stream)
    best = rates[losses.index(min(losses))]
    relative = {n: {t: x and round(x / best, 3) for t, x in row.items()} for n, row in crossings.items()}
    return {"best rate": best, "crossing / best": relative}


def _crossing(rates: list[float], values: list[float]) -> float | None:
    """The rate at which `values`, negative at low rates, turn positive for good; None if they do not."""
    above = [k for k in range(len(values)) if all(v > 0 for v in values[k:])]
    return None if not above or above[0] == 0 else math.sqrt(rates[above[0] - 1] * rates[above[0]])


def distance(stream: Stream, optimizer: str, seed: int, steps: int) -> dict:
    """The rate is the distance from the initial weights over the root of the sum of squared round displacements at unit
    rate, from 13 starts; the growth per round is at most 1.5. Its regrets, by start, against the sweep's best.
    """
    rates = grid(optimizer)
    plain = Models(rates, optimizer, seed, [1.0] * len(rates))
    train(plain, stream, steps, lambda step, start: None)
    models = Models(rates, optimizer, seed, [1.0] * len(rates))
    origin = [w.clone() for w in models.weights]
    farthest, squares = torch.zeros(len(rates)), torch.zeros(len(rates))

    def follow(step: int, start: list[Tensor]) -> Tensor:
        nonlocal farthest, squares
        used = models.rates * one_cycle(step - 1, steps)
        displacement = [w - s for w, s in zip(models.weights, start, strict=True)]
        squares = squares + (norm(displacement) / used).square()
        away = norm([w - o for w, o in zip(models.weights, origin, strict=True)])
        farthest = torch.maximum(farthest, away)
        wanted = farthest / squares.sqrt()
        return torch.minimum(wanted, 1.5 * models.rates)

    train(models, stream, steps, follow)
    best = min(plain.held_out(stream))
    regrets = [round(100 * (loss / best - 1), 1) for loss in models.held_out(stream)]
    return {"starts": rates, "regrets": regrets, "rates at the end": models.rates.tolist()}


def widths() -> str:
    """The regret in % at find_lr's rate, mean and worst, if an interval after which losses rise counts as so wide.

    In the last column it is as wide as find_lr has it, with an outer step of 1/2 and at the rate for that.
    """
    tried = (1, 2, 4, 8, 16, 32, 64)
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    rows = [row for row in rows if row["study"] == "factor" and "interval" in row]
    lines = ["| steps | rows | " + " | ".join(map(str, tried)) + " | outer 1/2 |", "|---" * (len(tried) + 3) + "|"]
    for steps in sorted({row["steps"] for row in rows}):
        part = [row for row in rows if row["steps"] == steps]
        found = [[_regret(row, width, 1.0) for row in part] for width in tried]
        found.append([_regret(row, Fine(steps).valley, 0.5) for row in part])
        cells = [f"{sum(regrets) / len(regrets):.2f} ({max(regrets):.2f})" for regrets in found]
        lines.append(f"| {steps} | {len(part)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _regret(row: dict, width: float, outer_step: float) -> float:
    low, high = row["interval"]
    lower = min(low, high / width) if row["rose"] else low
    rate = default_factor(outer_step, Fine(row["steps"])) * math.sqrt(lower * high)
    losses = row["losses" if outer_step == 1 else "losses, outer 1/2"]
    return 100 * (at(grid(row["optimizer"]), losses, rate) / min(row["losses"]) - 1)


STUDIES = {"factor": factor, "signals": signals, "distance": distance}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=[*STUDIES, "widths"])
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--noise", default="0,0.5,0.8")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seeds", default="0")
    arguments = parser.parse_args()
    if arguments.study == "widths":
        print(widths())
        return 0
    torch.set_num_threads(1)
    for rho in map(float, arguments.noise.split(",")):
        for optimizer in CENTERS:
            for seed in map(int, arguments.seeds.split(",")):
                about = {"study": arguments.study, "noise": rho, "optimizer": optimizer, "seed": seed}
                about |= {"steps": arguments.steps, "batch": arguments.batch}
                stream = Stream(rho, seed, arguments.batch)
                row = {**about, **STUDIES[arguments.study](stream, optimizer, seed, arguments.steps)}
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps({k: v for k, v in row.items() if not k.startswith("losses")}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
