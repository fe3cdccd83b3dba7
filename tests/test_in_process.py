"""Replicas in one process: the same code, and the same numbers, as on real processes."""

import copy
import gc
import threading
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from cases import batch
from processes import run
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils import data

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


@pytest.mark.parametrize("call", [lambda: DistributedDataParallel(nn.Linear(2, 1)), dist.get_rank, dist.barrier])
def test_what_to_write_instead_of_torch_distributed(call):
    with pytest.raises(hdet.ReplicaError, match=r"write hdet\.data_parallel\(model\) for DistributedDataParallel"):
        hdet.in_process(call, 2)


def test_an_error_of_the_users_own_gets_no_advice():
    with pytest.raises(hdet.ReplicaError, match=r"raised ZeroDivisionError: division by zero$"):
        hdet.in_process(lambda: 1 / 0, 2)


def wrapped_in_ddp():
    model = DistributedDataParallel(nn.Linear(2, 1))  # with a group of one process it can be made
    hdet.Ensemble(optim.SGD(model.parameters(), lr=0.1), total_steps=4, interval=2, model=model)


def ddp_in_one_process():
    with pytest.raises(hdet.ReplicaError, match="does not share gradients among the replicas"):
        hdet.in_process(wrapped_in_ddp, 2)
    wrapped_in_ddp()


def test_ddp_around_the_replicas_of_one_process_is_refused():
    run(ddp_in_one_process, 1)


def with_sparse_gradients(kind, guard):
    torch.manual_seed(0)
    rank, table, head = hdet.find_replicas().rank, nn.Embedding(20, 4, sparse=True), nn.Linear(4, 1)
    model = hdet.data_parallel(nn.Sequential(table, nn.Flatten(0, 1), head))
    optimizers = [optim.SGD(model.parameters(), lr=0.1)]
    if kind == "adam":
        optimizers = [optim.SparseAdam(table.parameters(), lr=0.01), optim.AdamW(head.parameters(), lr=0.01)]
    ensemble = hdet.Ensemble(
        optimizers,
        [hdet.learning_rate(optimizers, spread=0.3)],
        total_steps=10,
        interval=5,
        model=model,
        safety=hdet.Safety(guard=guard),
    )
    losses = []
    for step in range(10):
        for micro in range(2):  # gradients add up
            seed = 100 * step + 10 * micro + rank
            tokens = torch.randint(0, 20, (4, 3), generator=torch.Generator().manual_seed(seed))
            loss = (model(tokens) - tokens.view(-1, 1) / 10).square().mean()
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        ensemble.step(loss)
        losses.append(loss.item())
    return losses, [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_sparse_gradients_are_shared_as_ddp_shares_them(kind, guard):
    ours = hdet.in_process(with_sparse_gradients, 2, kind, guard)
    assert ours == run(with_sparse_gradients, 2, kind, guard)
    assert ours[0][1] == ours[1][1]


def with_copies():
    torch.manual_seed(0)
    rank, model = hdet.find_replicas().rank, hdet.data_parallel(nn.Linear(3, 1))
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    ensemble = hdet.Ensemble(
        optimizer, [hdet.learning_rate(optimizer, spread=0.3)], total_steps=6, interval=2, model=model
    )
    ema = optim.swa_utils.AveragedModel(model)  # copies it
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(6):
            model(torch.full((2, 3), step + rank + 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ensemble.step()
            ema.update_parameters(model)
            copied = copy.deepcopy(ensemble)
            copied.step()  # is plain
            assert copied.closed
            assert not ensemble.closed
    other = copy.deepcopy(model)
    other.zero_grad()
    other(torch.full((2, 3), rank + 1.0)).mean().backward()
    gradient = next(other.parameters()).grad.flatten().tolist()
    return (
        {str(w.message) for w in said},
        gradient,
        [p.tolist() for p in model.parameters()],
        ensemble.progress["round"],
    )


class Held:
    """A sink or a probe that cannot be copied."""

    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, given):
        return torch.tensor(1.0)


def loader():
    return data.DataLoader(data.TensorDataset(torch.ones(64, 3)), batch_size=4, num_workers=1, persistent_workers=True)


OPEN = {
    "file": lambda folder: {"on_round": [hdet.JSONLines(folder / "rounds.jsonl")]},
    "bar": lambda folder: {"on_round": [hdet.Progress(), Held()]},
    "probe": lambda folder: {"probe": Held(), "controller": hdet.Auto()},
    "workers": lambda folder: {"probe": hdet.Probe(loader(), lambda model, b: model(b[0]).mean(), batches=2)},
}


@pytest.mark.parametrize("kind", OPEN)
@pytest.mark.filterwarnings("ignore")
def test_what_an_ensemble_has_open_does_not_keep_it_from_being_copied(tmp_path, kind):
    def copied():
        model = nn.Linear(3, 1)
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        ensemble = hdet.Ensemble(
            optimizer, [hdet.learning_rate(optimizer)], total_steps=9, interval=3, model=model, **OPEN[kind](tmp_path)
        )  # fmt: skip
        for step in range(9):
            model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ensemble.step(1.0)
            if step == 4:
                copy.deepcopy([model, ensemble])[1].step(1.0)  # is plain
        return ensemble.progress["step"]

    assert hdet.in_process(copied, 2) == [9, 9]
    assert kind != "file" or len(hdet.records.read_records(tmp_path / "rounds.jsonl")) == 3


def test_ensembles_and_models_can_be_copied():
    first, second = run(with_copies, 2)
    assert first == second
    (said,) = first[0]
    assert "a copy of an Ensemble is closed" in said
    assert "load_state_dict" in said
    assert first[1] == [1.5] * 3  # the gradients of a copied model are shared too
    assert first[3] == 3
    assert [found[1:] for found in hdet.in_process(with_copies, 2)] == [first[1:], second[1:]]


def forgotten(fails):
    model = hdet.data_parallel(nn.Linear(2, 1))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    ensemble = hdet.Ensemble(optimizer, [hdet.learning_rate(optimizer)], total_steps=4, interval=2, model=model)
    for _ in range(4):
        loss = model(torch.ones(3, 2)).square().mean()
        loss.backward()
        optimizer.step()
        ensemble.step(loss)
    ALIVE.append(weakref.ref(model))
    if fails:
        raise RuntimeError("a mistake")


ALIVE = []


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_kept_of_replicas_that_have_returned_or_failed(fails):
    ALIVE.clear()
    try:
        hdet.in_process(forgotten, 2, fails)
    except hdet.ReplicaError:
        assert fails
    gc.collect()
    assert ALIVE
    assert [model() for model in ALIVE] == [None] * len(ALIVE)
