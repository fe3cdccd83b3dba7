"""Replicas in one process: the same code, and the same numbers, as on real processes."""

import pytest
import torch
from cases import batch
from processes import run
from torch import nn, optim

import hdet


def train(steps=50, spread=0.3, dropout=0.0):
    """What a user would run under torchrun."""
    replicas = hdet.find_replicas()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2)).double()
    model = hdet.data_parallel(net)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    scheduler = hdet.OneCycleAutoLR(
        optimizer, 0.02, total_steps=steps, ensemble_lr_spread_ratio=spread, model_sync_interval=7,
        enable_auto_lr=True, auto_lr_warmup_steps=10, loss_scale=0.05, model=model,
    )  # fmt: skip
    losses = []
    for step in range(steps):
        x, y = batch(replicas.rank, step, torch.float64)
        loss = ((model(x) - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        losses.append(loss.item())
        if step == 24:
            with scheduler.ensemble.consensus():
                losses.append(((model(x) - y) ** 2).mean().item())
    return losses, scheduler.get_last_lr(), torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("size", [2, 4])
def test_it_gives_the_losses_of_real_processes_to_1e9(size):
    ours, theirs = hdet.in_process(train, size), run(train, size)
    for (a, lr_a, w_a), (b, lr_b, w_b) in zip(ours, theirs, strict=True):
        assert len(a) == 51
        assert a == pytest.approx(b, abs=1e-9)
        assert lr_a == pytest.approx(lr_b, rel=1e-9)
        torch.testing.assert_close(w_a, w_b, rtol=0, atol=1e-9)
    assert all(torch.equal(w, ours[0][2]) for _, _, w in ours)
    assert ours[0][0] != ours[1][0]


@pytest.mark.parametrize("size", [1, 3, 16])
def test_runs_are_reproducible_and_replicas_have_their_own_random_numbers(size):
    def with_dropout():
        torch.manual_seed(hdet.find_replicas().rank)
        first = torch.rand(2).tolist()
        hdet.data_parallel(nn.Linear(2, 1))(torch.ones(1, 2)).sum().backward()  # the others have their turns
        return first + torch.rand(2).tolist()

    torch.manual_seed(99)
    before = torch.get_rng_state()
    results = hdet.in_process(with_dropout, size)
    assert torch.equal(before, torch.get_rng_state())
    for rank, numbers in enumerate(results):
        torch.manual_seed(rank)
        nn.init.uniform_(torch.empty(0))
        assert numbers[:2] == torch.rand(2).tolist()
    assert results == hdet.in_process(with_dropout, size)
    assert len({tuple(r) for r in results}) == size


def test_a_replica_that_raises_ends_the_others_and_is_named():
    def fail():
        replicas = hdet.find_replicas()
        model = hdet.data_parallel(nn.Linear(2, 1))
        for step in range(10):
            if replicas.rank == 2 and step == 5:
                raise KeyError("on purpose")
            model(torch.ones(1, 2)).sum().backward()

    with pytest.raises(hdet.ReplicaError, match="replica 2 raised KeyError") as caught:
        hdet.in_process(fail, 4)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_replica_that_stops_early_is_named():
    def stop():
        model = hdet.data_parallel(nn.Linear(2, 1))
        for _ in range(5 if hdet.find_replicas().rank == 1 else 10):
            model(torch.ones(1, 2)).sum().backward()

    with pytest.raises(hdet.ReplicaError, match=r"replica 1 has returned, but replica \d still waits"):
        hdet.in_process(stop, 3)


def test_outside_it_there_is_one_replica():
    hdet.in_process(lambda: None, 2)
    assert (hdet.find_replicas().rank, hdet.find_replicas().size) == (0, 1)
    model = nn.Linear(1, 1)
    assert hdet.data_parallel(model) is model


def test_warm_init_differs_between_replicas():
    def noisy():
        model = hdet.data_parallel(nn.Linear(4, 4))
        hdet.warm_init(model)
        return model.module.weight.detach().clone()

    a, b = hdet.in_process(noisy, 2)
    assert not torch.equal(a, b)
