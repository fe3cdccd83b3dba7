"""From a rate that is 1,000 times too low and one that is 30 times too high: the one line, against a sweep."""

import pytest
import torch
import torch.distributed as dist
from processes import run
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hdet

EPOCHS, GLOBAL_BATCH = 13, 40
SWEEP = [1e-3, 3e-3, 1e-2, 3e-2, 1e-1]
BAD = [1e-5, 0.3]


def loss_fn(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def train(rate, finds):
    """The held-out loss after about 400 steps of digits, on this replica; the script of a user, and one line."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    digits = load_digits()
    x, y = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    data = TensorDataset(x[:1200], y[:1200])
    loader = DataLoader(data, GLOBAL_BATCH // size, sampler=DistributedSampler(data, size, rank, seed=3))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = DistributedDataParallel(model) if size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    steps = EPOCHS * len(loader)
    scheduler = OneCycleLR(optimizer, max_lr=rate, total_steps=steps)
    if finds:
        hdet.find_lr(model, optimizer, loader, loss_fn, total_steps=steps).apply(optimizer, scheduler)
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            loss_fn(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    with torch.no_grad():
        return loss_fn(model, (x[1200:], y[1200:])).item()


@pytest.fixture(scope="module")
def best():
    return min(train(rate, False) for rate in SWEEP)


@pytest.mark.parametrize("start", BAD)
@pytest.mark.parametrize("replicas", [1, 2])
def test_one_line_ends_as_the_best_of_a_sweep(best, replicas, start):
    losses = [train(start, True)] if replicas == 1 else run(train, 2, start, True)
    assert len(set(losses)) == 1
    assert losses[0] < 1.3 * best
    if replicas == 1:
        assert train(start, False) > 1.5 * best  # without it
