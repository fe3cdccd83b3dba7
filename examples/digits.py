"""Train a small network on handwritten digits twice: with torch's OneCycleLR, then with hdet's OneCycleAutoLR.

Same seed, same data, same number of steps: `train()` marks the two places where the runs differ. It prints the
learning rates that the replicas tried in one round, and both results on images that were held out from training.

    pip install scikit-learn tqdm
    torchrun --standalone --nproc-per-node 4 examples/digits.py

Any number of replicas works. With one (`python examples/digits.py`) nothing can fan out, as hdet warns.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

from hdet import OneCycleAutoLR, RoundRecord

try:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from tqdm import tqdm
except ModuleNotFoundError as missing:
    sys.exit(f"digits.py needs {missing.name}, which is not installed: pip install scikit-learn tqdm")

SEED, MAX_LR, GLOBAL_BATCH = 0, 1e-2, 128
RANK, REPLICAS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
Examples: TypeAlias = tuple[Tensor, Tensor]  # images and labels


class Result(NamedTuple):
    losses: Tensor  # of each held-out image
    accuracy: float
    seconds: float


def load_data() -> tuple[Examples, Examples]:
    """Half of the images to train on, and the half that is held out."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images).float().unsqueeze(1) / 16, torch.tensor(digits.target)
    rest, held_out = train_test_split(torch.arange(len(labels)), test_size=0.5, stratify=labels, random_state=SEED)
    return (images[rest], labels[rest]), (images[held_out], labels[held_out])


def my_batches(data: Examples, steps: int) -> Iterator[Examples]:
    """This replica's own part of each global batch, which all replicas draw alike from the seed."""
    images, labels = data
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(steps):
        batch = torch.randperm(len(labels), generator=generator)[:GLOBAL_BATCH]
        noise = 0.3 * torch.randn(GLOBAL_BATCH, 1, 8, 8, generator=generator)  # without it the task is too easy
        yield (images[batch] + noise)[RANK::REPLICAS], labels[batch][RANK::REPLICAS]


def build_model() -> nn.Module:
    torch.manual_seed(SEED)
    layers: list[nn.Module] = []
    for inputs, outputs, stride in [(1, 16, 1), (16, 32, 2), (32, 64, 2)]:
        layers += [nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 2 * 2, 10))
    return DistributedDataParallel(model) if dist.is_initialized() else model


@torch.no_grad()
def evaluate(model: nn.Module, data: Examples) -> tuple[Tensor, float]:
    """The loss of each image, and the accuracy in percent."""
    images, labels = data
    model.eval()
    logits = model(images)
    model.train()
    right = logits.argmax(1) == labels
    return cross_entropy(logits, labels, reduction="none").double(), 100 * right.double().mean().item()


def train(method: str, data: Examples, held_out: Examples, steps: int, records: list[RoundRecord]) -> Result:
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    if method == "OneCycleLR":  # difference 1 of 2: the scheduler
        scheduler = OneCycleLR(optimizer, max_lr=MAX_LR, total_steps=steps)
    else:
        scheduler = OneCycleAutoLR(
            optimizer,
            max_lr=MAX_LR,
            total_steps=steps,
            ensemble_lr_spread_ratio=1 / 9,  # the replicas' rates lie between 8/9 and 10/9 of the schedule's
            model_sync_interval=max(1, min(16, steps // 5)),  # steps per round, at whose end they are averaged
            enable_auto_lr=True,  # their losses move the schedule's rate
            auto_lr_warmup_steps=steps // 3,  # from here on
            loss_scale=0.1,  # as in the paper's runs: a loss lower by 0.1 makes a rate count e times as much
            model=model,  # BatchNorm's statistics are averaged like the weights
            on_round=[records.append],
        )

    started = time.perf_counter()
    shown: dict[str, str] = {}
    every = 0.2 if sys.stderr.isatty() else 10  # seconds: a live bar on a terminal, few lines in a log
    bar = tqdm(my_batches(data, steps), method, steps, disable=RANK != 0, mininterval=every)
    for step, (images, labels) in enumerate(bar, start=1):
        lr = float(scheduler.get_last_lr()[0])
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(scheduler, OneCycleAutoLR):  # difference 2 of 2: step() is given this replica's loss
            scheduler.step(loss)
        else:
            scheduler.step()

        if step == steps // 2:
            # In mid-round the replicas hold different weights; inside consensus() all hold the average.
            with scheduler.ensemble.consensus() if isinstance(scheduler, OneCycleAutoLR) else nullcontext():
                shown["halfway_accuracy"] = f"{evaluate(model, held_out)[1]:.1f}%"
        bar.set_postfix({"loss": f"{loss.item():.3f}", "lr": f"{lr:.1e}"} | shown, refresh=False)
    return Result(*evaluate(model, held_out), time.perf_counter() - started)  # the last step averaged the replicas


def print_round(record: RoundRecord) -> None:
    rate = record.hyperparameters["learning_rate/0"]
    print(f"\nThe round that ended at step {record.step}, at {rate.base:.2e} on the schedule:\n")
    print("replica  multiplier  learning rate  training loss")
    for replica, (value, loss) in enumerate(zip(rate.values, record.scores, strict=True)):
        print(f"{replica:7}  {value / rate.center:10.4f}  {value:13.2e}  {loss:13.4f}")
    print(f"\nThen the replicas were averaged and went on around {rate.scale:.4f} times the schedule.")


def print_results(plain: Result, fanned: Result, steps: int) -> None:
    print("\nmethod          held-out loss  held-out accuracy  steps  seconds")
    for method, r in (("OneCycleLR", plain), ("OneCycleAutoLR", fanned)):
        print(f"{method:14}  {r.losses.mean():13.4f}  {r.accuracy:16.2f}%  {steps:5}  {r.seconds:7.1f}")
    change = fanned.losses - plain.losses
    mean, error = change.mean().item(), change.std().item() / len(change) ** 0.5
    shows = "no difference that these images can show"
    if abs(mean) > 2 * error:
        shows = "more than the noise of these images, but this is one seed"
    print(f"\nWith OneCycleAutoLR the held-out loss differs by {mean:+.5f} (standard error {error:.5f}): {shows}.")


def main() -> None:
    parser = argparse.ArgumentParser(description="OneCycleLR and hdet's OneCycleAutoLR on handwritten digits.")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of each of the two runs")
    steps = parser.parse_args().steps
    if REPLICAS > 1:
        dist.init_process_group("gloo")
    data, held_out = load_data()
    records: list[RoundRecord] = []
    plain, fanned = (train(method, data, held_out, steps, records) for method in ("OneCycleLR", "OneCycleAutoLR"))
    if RANK == 0:
        if records:  # none with one replica
            print_round(records[len(records) // 2])
        print_results(plain, fanned, steps)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
