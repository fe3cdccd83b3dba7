import contextlib
import copy
import dataclasses
import inspect
import io
import itertools
import json
import math
import pickle
import random
import re
import signal
import statistics
import sys
import time
import warnings

import numpy as np
import pytest
import torch
from processes import run
from torch import nn, optim
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import hdet
from hdet._find_lr.decisions import Coarse, Fine, is_dead, smooth
from hdet._find_lr.doubts import doubts
from hdet._tensors.restore import Weights

SAMPLES = 64


class Net(nn.Module):
    """BatchNorm, dropout and two groups' worth of parameters."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 16), nn.BatchNorm1d(16)
        self.drop, self.last = nn.Dropout(0.1), nn.Linear(16, 1)

    def forward(self, x):
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


def make(dtype=torch.float64, kind=Net):
    torch.manual_seed(0)
    return kind().to(dtype)


def plain_net():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(index, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 + index)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=dtype)
    return x, torch.sin(x).sum(1, keepdim=True) + 0.1 * torch.randn(SAMPLES, 1, generator=generator, dtype=dtype)


def loss_fn(model, pair):
    return mse_loss(model(pair[0]), pair[1])


def make_probe(dtype=torch.float64):
    def chunks(index):
        return [tuple(t.split(16)[k] for t in batch(-index - n, dtype)) for n in range(1, 4) for k in range(4)]

    return hdet.Probe(chunks, loss_fn)


def find(model, optimizer, replicas=None, **options):
    rank, size = (0, 1) if replicas is None else (replicas.rank, replicas.size)
    dtype = next(model.parameters()).dtype

    def step(index):
        x, y = batch(index, dtype)
        loss = loss_fn(model, (x[rank::size], y[rank::size]))
        loss.backward()
        return loss

    return hdet.find_lr(model, optimizer, options.pop("step_fn", step), probe=make_probe(dtype), **options)


def bits(value):
    """Any state, as bytes that compare."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def everything(model, optimizer):
    return {
        "model": [t.detach().numpy().tobytes() for t in model.state_dict().values()],
        "objects": [id(t) for t in model.state_dict(keep_vars=True).values()],
        "gradients": [None if p.grad is None else (id(p.grad), p.grad.numpy().tobytes()) for p in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "state": str({id(p): {k: (id(v), str(v)) for k, v in s.items()} for p, s in optimizer.state.items()}),
        "state, bit for bit": bits(optimizer.state_dict()["state"]),
        "groups": str([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]),
        "group objects": [(id(g), id(g["lr"]), [id(p) for p in g["params"]]) for g in optimizer.param_groups],
        "attributes": {name: id(value) for name, value in vars(optimizer).items()},
        "hooks": [list(vars(optimizer)[f"_optimizer_step_{w}_hooks"].items()) for w in ("pre", "post")],
        "generators": (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())),
    }


class Position:
    """Where a data loader is."""

    def __init__(self):
        self.at = 3

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def prepare(loaded):
    model = make()
    groups = [
        {"params": list(model.first.parameters())},
        {"params": [*model.norm.parameters(), *model.last.parameters()]},
    ]
    optimizer = optim.AdamW(groups, lr=torch.tensor(1e-3), foreach=False)
    scheduler = OneCycleLR(optimizer, max_lr=[1e-3, 1e-2], total_steps=100)
    ensemble = hdet.Ensemble(optimizer, [hdet.learning_rate(optimizer, spread=0.1)], total_steps=100, model=model)
    if loaded:
        for index in range(3):
            optimizer.zero_grad()
            loss_fn(model, batch(index)).backward()
            optimizer.step()
            scheduler.step()
            ensemble.step()
        model.drop.eval()
    return model, optimizer, scheduler, ensemble


@pytest.mark.filterwarnings("ignore:only one replica", "ignore:.*one replica")
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("raising", [None, KeyError, KeyboardInterrupt])
def test_everything_is_put_back(loaded, raising):
    model, optimizer, scheduler, ensemble = prepare(loaded)
    position = Position()
    before = everything(model, optimizer), copy.deepcopy(ensemble.state_dict()), scheduler.state_dict()["_step_count"]
    steps = itertools.count()

    def step(index):
        position.at += 1
        torch.rand(1), random.random(), np.random.rand()
        model.train()
        model.drop.p = 0.1
        loss_fn(model, batch(index)).backward()
        if raising is not None and next(steps) == 100:
            raise raising

    if raising is None:
        found = find(model, optimizer, step_fn=step, also=[position])
        assert found.steps > 100
    else:
        with pytest.raises(raising):
            find(model, optimizer, step_fn=step, also=[position])
    after = everything(model, optimizer), ensemble.state_dict(), scheduler.state_dict()["_step_count"]
    for name, value in before[0].items():
        assert after[0][name] == value, name
    assert bits(after[1:]) == bits(before[1:])
    assert position.at == 3
    assert getattr(optimizer, "_opt_called", False) is loaded
    ensemble.close()


@pytest.mark.filterwarnings("error")
def test_training_afterwards_is_bit_for_bit_the_same():
    def train(look):
        model = make()
        optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        scheduler = OneCycleLR(optimizer, max_lr=0.02, total_steps=20)
        if look:
            find(model, optimizer)
        for index in range(20):
            optimizer.zero_grad()
            loss_fn(model, batch(index)).backward()
            optimizer.step()
            if index < 19:
                scheduler.step()
        return [t.numpy().tobytes() for t in model.state_dict().values()]

    assert train(True) == train(False)


OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, lr=1e-2),
    "momentum": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda p: optim.Adam(p, lr=1e-3),
    "adam, tensor": lambda p: optim.Adam(p, lr=torch.tensor(1e-3), fused=True),
    "adamw, foreach": lambda p: optim.AdamW(p, lr=1e-3, foreach=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: optim.RMSprop(p, lr=1e-3),
    "adafactor": lambda p: optim.Adafactor(p, lr=1e-2),
}


class Follower(nn.Module):
    """A network beside a slow copy of itself, as in momentum contrast: the copy follows from the step `since` on."""

    def __init__(self, since):
        super().__init__()
        self.inner, self.since, self.calls = plain_net(), since, 0
        self.slow = copy.deepcopy(self.inner).requires_grad_(False)

    def forward(self, x):
        self.calls += self.training
        if self.training and self.calls > self.since:
            with torch.no_grad():
                for slow, p in zip(self.slow.parameters(), self.inner.parameters(), strict=True):
                    slow.data = 0.9 * slow.data + 0.1 * p.data
        return self.inner(x) + 0 * self.slow(x)


def test_frozen_parameters_that_the_forward_pass_changes_are_put_back():
    torch.manual_seed(0)
    model = Follower(0).double()
    optimizer = torch.optim.SGD(model.inner.parameters(), lr=0.01)
    before = everything(model, optimizer)
    find(model, optimizer)
    assert everything(model, optimizer) == before


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_frozen_parameters_of_any_kind(dtype):
    """Those of a quantised backbone, and one that shares one element among many."""
    model = plain_net()
    last = model[2]
    last.frozen = nn.Parameter(torch.ones(3, 2).to(dtype), requires_grad=False)
    last.shared = nn.Parameter(torch.ones(1).expand(5), requires_grad=False)
    last.nothing = nn.Parameter(torch.ones(0), requires_grad=False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    assert find(model, optimizer).rate > 0
    assert torch.equal(last.frozen.view(-1).view(torch.uint8), torch.ones(3, 2).to(dtype).view(-1).view(torch.uint8))


def test_frozen_parameters_that_change_late_are_told():
    torch.manual_seed(0)
    model = Follower(100).double()  # the first ramp has 80 steps
    optimizer = torch.optim.SGD(model.inner.parameters(), lr=0.01)
    with pytest.warns(UserWarning, match="parameters changed that no optimizer trains"):
        find(model, optimizer)
    fixed = Follower(100).double()
    optimizer = torch.optim.SGD(fixed.inner.parameters(), lr=0.01)
    before = everything(fixed, optimizer)
    find(fixed, optimizer, also=[fixed.slow])
    assert everything(fixed, optimizer) == before


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer(name):
    model = make(kind=plain_net, dtype=torch.float32)
    optimizer = OPTIMIZERS[name](model.parameters())
    before = everything(model, optimizer)
    found = find(model, optimizer)
    low, high = found.interval
    assert low < high
    rose = high < found.fine[-1][0]
    assert found.whole == (min(low, high / 16) if rose else low, high)
    width = math.log(high / low) / math.log(16)
    factor = 2 ** min(max(2 * width - 1, 0), 1) / 2 if isinstance(optimizer, optim.SGD) else 0.5
    assert found.factor == pytest.approx(factor)
    assert found.rate == float(found) == pytest.approx(factor * math.sqrt(found.whole[0] * high))
    assert f"{found:.3g}" == f"{found.rate:.3g}"
    assert f"{found}" == str(found)
    assert ("narrow, so counted" in str(found)) is (rose and high < 16 * low)
    assert everything(model, optimizer) == before
    again = find(model, optimizer)
    assert (again.rate, again.coarse, again.fine) == (found.rate, found.coarse, found.fine)


def test_groups_and_optimizers_keep_their_ratios_and_the_peak_is_the_reference():
    model = make(kind=plain_net)
    first = optim.AdamW([{"params": model[0].weight, "lr": 4e-3}, {"params": model[0].bias, "lr": 0.0}], lr=1.0)
    second = optim.SGD(model[2].parameters(), lr=1e-3, momentum=0.9)
    seen = set()
    second.register_step_pre_hook(lambda *_: pytest.fail("a hook saw the test"))
    step = optim.SGD.step

    def spy(self, closure=None):
        (a, b), (c,) = ([g["lr"] for g in o.param_groups] for o in (first, second))
        assert b == 0
        seen.add((round(c / a, 12), second.param_groups[0]["momentum"]))
        return step(self, closure)

    OneCycleLR(second, max_lr=1e-2, total_steps=10)
    second.step = spy.__get__(second)
    found = find(model, [first, second], outer_step=0.5)
    assert seen == {(2.5, 0.85)}
    assert second.param_groups[0]["momentum"] == 0.95
    assert found.factor == 1.0
    assert found.rates[0] == (pytest.approx(found.rate), 0.0)
    assert found.rates[1] == (pytest.approx(2.5 * found.rate),)
    assert found.scale == pytest.approx(found.rate / 4e-3)


def test_sgd_beside_another_optimizer_counts_as_the_other():
    model = make(kind=plain_net)
    first, *others = model.parameters()
    alone = find(model, optim.SGD(model.parameters(), lr=0.1))
    assert 0.5 < alone.factor <= 1.0, "losses are low over a wide range here"
    assert find(model, [optim.SGD([first], lr=0.1), optim.Adam(others, lr=0.1)]).factor == 0.5


def test_a_warm_up_from_zero():
    model = make(kind=plain_net)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    plain = find(model, optimizer)
    LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    assert find(model, optimizer).rate == plain.rate


def replicated(kind):
    replicas = hdet.find_replicas()
    model = hdet.data_parallel(make(kind=kind)) if replicas.size > 1 else make(kind=kind)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    before = everything(model, optimizer)
    found = find(model, optimizer, replicas)
    assert {k: v for k, v in everything(model, optimizer).items() if k != "generators"} == {
        k: v for k, v in before.items() if k != "generators"
    }
    assert torch.get_rng_state().tolist() == before["generators"][0]
    return found


def test_one_process_and_replicas_find_the_same():
    alone = replicated(plain_net)
    for runner, size in ((hdet.in_process, 2), (run, 2), (run, 4)):
        everyone = runner(replicated, size, plain_net)
        for found in everyone:
            assert found.coarse == everyone[0].coarse  # to the last bit, so that all decide alike
            assert found.fine == everyone[0].fine
            assert found.rate == pytest.approx(alone.rate, rel=1e-6)
            assert found.samples == alone.samples
            for ours, theirs in ((found.coarse, alone.coarse), (found.fine, alone.fine)):
                assert [rate for rate, _ in ours] == pytest.approx([rate for rate, _ in theirs], rel=1e-6)
                assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], rel=1e-6)


def beside_a_slow_one(slow):
    replicas = hdet.find_replicas()
    model = hdet.data_parallel(make(kind=plain_net))

    def step(index):
        x, y = batch(index)
        loss = loss_fn(model, (x[replicas.rank :: replicas.size], y[replicas.rank :: replicas.size]))
        time.sleep(0.002 if slow == "step" and replicas.rank == 1 else 0)
        loss.backward()

    def loss(model, pair):
        time.sleep(0.01 if slow == "score" and replicas.rank == 1 else 0)
        return loss_fn(model, pair)

    probe = hdet.Probe(lambda index: [tuple(t.split(16)[k] for t in batch(-1)) for k in range(4)], loss)
    optimizer = optim.AdamW([{"params": model.parameters()}], lr=1e-3)
    return dataclasses.asdict(hdet.find_lr(model, optimizer, step, probe=probe, total_steps=500))


@pytest.mark.parametrize("slow", ["step", "score"])
def test_all_that_is_found_is_the_same_on_all_replicas(slow):
    first, *others = run(beside_a_slow_one, 3, slow)
    assert others == [first, first]
    assert first["cost"] > first["steps"]
    assert first["seconds"] > 0


def test_batch_norm_and_dropout_under_ddp():
    first, second = run(replicated, 2, Net)
    assert first.fine == second.fine


def unequal():
    model = hdet.data_parallel(make())
    hdet.warm_init(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="all replicas must hold the same weights"):
        find(model, optimizer)


def test_replicas_that_differ_are_refused():
    run(unequal, 2)


def test_the_answer_does_not_depend_on_the_start():
    sklearn = pytest.importorskip("sklearn.datasets")
    digits = sklearn.load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)

    def entropy(model, pair):
        return cross_entropy(model(pair[0]), pair[1])

    for kind, lr in ((optim.AdamW, 3e-3), (optim.SGD, 0.3)):
        rates = []
        for start in (1 / 30, 1, 10):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

            def step(index, model=model):
                chosen = torch.randint(len(y), (64,), generator=torch.Generator().manual_seed(index))
                entropy(model, (x[chosen], y[chosen])).backward()

            probe = hdet.Probe(torch.utils.data.TensorDataset(x, y), entropy, size=256)
            rates.append(hdet.find_lr(model, kind(model.parameters(), lr=lr * start), step, probe=probe).rate)
        assert statistics.stdev(map(math.log, rates)) < 0.25, rates


def test_a_loss_that_never_falls():
    model = make(kind=plain_net)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    before = everything(model, optimizer)
    with pytest.raises(hdet.FindLRError, match=r"less than 1 %.*check that what is trained is the loss that is scored"):
        find(model, optimizer, step_fn=lambda index: (-loss_fn(model, batch(index))).backward())
    with pytest.raises(hdet.FindLRError, match=r"less than 1 %.*did not rise either: begin with a higher rate") as idle:
        find(model, optimizer, step_fn=lambda index: (1e-19 * loss_fn(model, batch(index))).backward())
    assert idle.value.worse_above is None
    with pytest.raises(ValueError, match=r"step_fn must call backward"):
        find(model, optimizer, step_fn=lambda index: None)
    for bad in (math.nan, -1.0):
        probe = hdet.Probe(lambda index: [torch.ones(1)], lambda m, b, bad=bad: torch.tensor(bad))
        with pytest.raises(hdet.FindLRError, match="must be positive and finite"):
            hdet.find_lr(model, optimizer, lambda index: None, probe=probe)
    assert everything(model, optimizer) == before


def test_a_loss_that_does_not_move_wants_a_higher_rate():
    model = make(kind=plain_net)
    with pytest.raises(hdet.FindLRError, match="begin with a higher rate"):
        find(model, optim.SGD(model.parameters(), lr=1e-30))


def test_a_loss_that_rises_at_once_wants_a_lower_rate():
    model = make(kind=plain_net)
    with pytest.raises(hdet.FindLRError, match="rose at the lowest one already: begin with a lower rate") as error:
        find(model, optim.SGD(model.parameters(), lr=1e9))
    assert error.value.worse_above > 1e5


def copied(model):
    return copy.deepcopy(model)


def in_another_place(model):
    """As `load_state_dict(assign=True)` or quantising does it after the optimizer was made."""
    before = copy.deepcopy(model)
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            module._parameters[name] = nn.Parameter(p.detach().clone())
    return before


@pytest.mark.parametrize("of", [copied, in_another_place])
@pytest.mark.parametrize("trained", ["the model", "the other"])
def test_an_optimizer_of_another_model_is_named(of, trained):
    model = make(kind=plain_net)
    optimizer = optim.AdamW((other := of(model)).parameters(), lr=1e-3)
    stepping = model if trained == "the model" else other
    with pytest.raises(hdet.FindLRError, match=r"holds no parameter of the model that the probe scores.*make the opt"):
        find(model, optimizer, step_fn=lambda index: loss_fn(stepping, batch(index)).backward())


def test_a_probe_of_another_model_is_named():
    model = make(kind=plain_net)
    other = copy.deepcopy(model)
    probe = hdet.Probe(lambda index: [batch(-1)], lambda _, pair: loss_fn(other, pair))
    with pytest.raises(hdet.FindLRError, match=r"did not change at all.*must use the model that it is given"):
        hdet.find_lr(
            model, optim.AdamW(model.parameters()), lambda i: loss_fn(model, batch(i)).backward(), probe=probe
        )  # fmt: skip


@pytest.mark.parametrize("kind", ["head", "compiled"])
def test_an_optimizer_of_a_part_or_of_a_wrapped_model_is_right(kind):
    model = make(kind=plain_net)
    optimizer = optim.AdamW(model[2].parameters() if kind == "head" else model.parameters(), lr=1e-3)
    assert find(torch.compile(model, backend="eager") if kind == "compiled" else model, optimizer).sure


def of_another_model():
    replicas = hdet.find_replicas()
    model, other = (hdet.data_parallel(make(kind=plain_net)) for _ in range(2))
    with pytest.raises(hdet.FindLRError) as error:
        find(model, optim.SGD(other.parameters(), lr=1e-3), replicas)
    return str(error.value)


def test_all_replicas_say_the_same_if_no_rate_is_found():
    first, second = run(of_another_model, 2)
    assert first == second
    assert "holds no parameter" in first


@pytest.mark.parametrize("start", [1e-5, 3e-3, 1.0])
def test_for_trained_weights_it_says_from_which_rate_on_they_get_worse(start):
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    optimizer = optim.AdamW(model.parameters(), lr=3e-2)

    def pair(index):
        x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(10_000 + index))
        return x, x.sum(1, keepdim=True) + torch.randn(SAMPLES, 1, generator=torch.Generator().manual_seed(index))

    def step(index):
        loss_fn(model, pair(index)).backward()

    schedule = optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 1000)
    for index in range(1000):
        optimizer.zero_grad()
        step(index)
        optimizer.step()
        schedule.step()
    probe = hdet.Probe(lambda index: [pair(2000 + k) for k in range(4)], loss_fn)
    with pytest.raises(hdet.FindLRError) as error:
        hdet.find_lr(model, optim.AdamW(model.parameters(), lr=start), step, probe=probe)
    said, bound = str(error.value), error.value.worse_above
    assert (
        f"rates above {bound:.3g} make it worse, as with weights that are trained already: train at a rate below"
        in said
    )
    assert "some hundred steps" not in said
    assert 3e-3 < bound < 1.0
    assert pickle.loads(pickle.dumps(error.value)).worse_above == bound


# What speaks against an answer


class Factors(nn.Module):
    """A regression on embeddings whose products are tiny at first: a plateau, on which only the mean is learned."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.users, self.items, self.mean = nn.Embedding(300, 16), nn.Embedding(200, 16), nn.Parameter(torch.zeros(1))
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, 0, 0.1)

    def forward(self, pair):
        return (self.users(pair[:, 0]) * self.items(pair[:, 1])).sum(1) + self.mean


def ratings(index):
    users, items = (torch.randn(n, 8, generator=torch.Generator().manual_seed(n)) for n in (300, 200))
    drawn = torch.Generator().manual_seed(index)
    pairs = torch.stack([torch.randint(n, (128,), generator=drawn) for n in (300, 200)], 1)
    return pairs, 0.1 + (users[pairs[:, 0]] * items[pairs[:, 1]]).sum(1) / 3 + torch.randn(128, generator=drawn) / 3


def find_on_a_plateau(search=hdet.find_lr):
    model = hdet.data_parallel(Factors()) if hdet.find_replicas().size > 1 else Factors()

    def step(index):
        loss_fn(model, ratings(index)).backward()

    probe = hdet.Probe(lambda index: [ratings(1000 + k) for k in range(4)], loss_fn)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = search(model, optim.SGD(model.parameters(), lr=0.1), step, probe=probe)
    return found, [str(w.message) for w in caught if "not sure" in str(w.message)]


def by_ensemble_with_record(model, optimizer, step, probe):
    records = []
    ensemble = hdet.Ensemble(
        optimizer, total_steps=1000, controller=hdet.Auto(), model=model, probe=probe, on_round=[records.append]
    )
    found = ensemble.find_lr(step)
    for index in range(ensemble.interval):
        optimizer.zero_grad()
        step(index)
        optimizer.step()
        ensemble.step(1.0)
    ensemble.close()
    assert f"found: {found}" in records[0].events
    return found


@pytest.mark.parametrize("search", [hdet.find_lr, by_ensemble_with_record])
def test_a_small_fall_on_a_plateau_is_not_taken_for_an_answer(search, tmp_path):
    found, said = find_on_a_plateau(search)
    assert not found.sure
    assert re.fullmatch(r"the loss fell by only [1-4]\.\d %, from 1\.\d+ to 1\.\d+", found.doubts[0])
    doubt = "; ".join(found.doubts)
    assert str(found).endswith(f"; not sure: {doubt}")
    (told,) = said
    assert told.startswith(f"the learning rate that was found, {found.rate:.3g}, is not sure: {doubt}. Compare short")
    found.plot(tmp_path / "unsure.png")


def test_every_replica_warns_alike():
    (found, said), *others = run(find_on_a_plateau, 2)
    assert not found.sure
    assert len(said) == 1
    assert others == [(found, said)]


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_warning_that_is_an_error_finds_everything_put_back():
    model = Factors()
    before = everything(model, optimizer := optim.SGD(model.parameters(), lr=0.1))
    probe = hdet.Probe(lambda index: [ratings(1000 + k) for k in range(4)], loss_fn)
    with pytest.raises(UserWarning, match="not sure"):
        hdet.find_lr(model, optimizer, lambda index: loss_fn(model, ratings(index)).backward(), probe=probe)
    assert everything(model, optimizer) == before


def digits_problem():
    sklearn = pytest.importorskip("sklearn.datasets")
    digits = sklearn.load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    body = nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2), nn.BatchNorm2d(16)

    def draw(index):
        chosen = torch.randint(len(y), (64,), generator=torch.Generator().manual_seed(index))
        return x[chosen], y[chosen]

    return nn.Sequential(*body, nn.ReLU(), nn.Flatten(), nn.Linear(64, 10)), draw, cross_entropy


def noisy_line():
    """A fall of less than a tenth is all that there is to learn."""

    def draw(index):
        drawn = torch.Generator().manual_seed(index)
        x = torch.randn(64, 20, generator=drawn)
        return x, 0.3 * x.sum(1, keepdim=True) + 4 * torch.randn(64, 1, generator=drawn)

    return nn.Linear(20, 1), draw, mse_loss


class Reader(nn.Module):
    def __init__(self, letters):
        super().__init__()
        self.table, self.cell = nn.Embedding(letters, 32), nn.GRU(32, 64, batch_first=True)
        self.last = nn.Linear(64, letters)

    def forward(self, text):
        return self.last(self.cell(self.table(text))[0]).transpose(1, 2)


def next_letters():
    text = inspect.getsource(inspect)
    letters = sorted(set(text))
    coded = torch.tensor([letters.index(letter) for letter in text[:50_000]])

    def draw(index):
        starts = torch.randint(len(coded) - 25, (16,), generator=torch.Generator().manual_seed(index))
        rows = torch.stack([coded[start : start + 25] for start in starts])
        return rows[:, :-1], rows[:, 1:]

    return Reader(len(letters)), draw, cross_entropy


@pytest.mark.parametrize("kind", [optim.AdamW, lambda p, lr: optim.SGD(p, lr=30 * lr, momentum=0.9)])
@pytest.mark.parametrize("problem", [digits_problem, noisy_line, next_letters])
@pytest.mark.filterwarnings("error::UserWarning")
def test_nothing_speaks_against_a_good_answer(problem, kind):
    torch.manual_seed(0)
    model, draw, loss = problem()

    def score(model, pair):
        return loss(model(pair[0]), pair[1])

    probe = hdet.Probe(lambda index: [draw(1000 + k) for k in range(4)], score)
    optimizer = kind(model.parameters(), lr=1e-3)
    found = hdet.find_lr(model, optimizer, lambda i: score(model, draw(i)).backward(), probe=probe, total_steps=1000)
    assert found.sure
    assert found.doubts == ()
    assert "not sure" not in str(found)


def curve_of(losses, lowest=1.0):
    return [(lowest * 2.0**k, loss) for k, loss in enumerate(losses)]


def test_each_ground_for_doubt():
    noise = [0.06 * (-1) ** k for k in range(12)]
    falling, deeper = [1.0, 1.0, 0.95, 0.9, 0.85, 0.8, 0.8, 0.8, 1.1], [1.0] * 6 + [0.5, 0.5, 0.5, 1.1]
    scattered = [1.0 - 0.1 * k / 11 + n for k, n in enumerate(noise)]
    whole = curve_of([1.0] * 20 + [0.8] * (Fine().scores - 20))
    inside = (3.0, 100.0)
    said = {
        "nothing": doubts(1.0, curve_of(falling), curve_of(falling), Fine(), inside),
        "small": doubts(1.0, curve_of(falling), curve_of([1.0, 0.99, 0.97, 0.97, 0.97, 1.03]), Fine(), inside),
        "scatter": doubts(1.0, curve_of(falling), curve_of(scattered), Fine(), inside),
        "deeper": doubts(1.0, curve_of(deeper), curve_of(falling), Fine(), (3.0, 20.0)),
        "begins": doubts(1.0, curve_of(falling), curve_of(falling), Fine(), (1.0, 100.0)),
        "ends": doubts(1.0, curve_of(falling), whole, Fine(), (3.0, whole[-1][0])),
    }
    assert said.pop("nothing") == ()
    words = {
        "small": "the loss fell by only 3.0 %",
        "scatter": "times what its scores scatter by",
        "deeper": "in the first ramp the loss fell further, by 50.0 %, at higher rates, about 128",
        "begins": "the loss was low from the lowest rate of the second ramp on, 1",
        "ends": "the loss was still low where the second ramp ended",
    }
    for name, (doubt,) in said.items():
        assert words[name] in doubt
    assert [word in doubt for (doubt,) in said.values() for word in ("not finite", "diverge")] == [False] * 10


def test_a_scale_of_the_loss_changes_no_doubt():
    losses = [1.0, 0.99, 1.0, 0.99, 1.0, 0.98, 0.99, 0.97, 0.98, 0.96, 0.97, 0.95, 1.03]
    one, many = (doubts(s, *[curve_of([s * x for x in losses])] * 2, Fine(), (1.0, 9.0)) for s in (1.0, 1024.0))
    assert [doubt.split(",")[0] for doubt in one] == [doubt.split(",")[0] for doubt in many]
    assert len(one) == 3


@pytest.mark.parametrize(
    ("interval", "whole", "rate", "words"),
    [
        ((1.0, 100.0), (1.0, 100.0), 5.0, None),
        ((1.0, 2.0), (1.0, 2.0), 0.7, "below the low losses: a run stays longer at a rate"),
        ((1.0, 2.0), (0.125, 2.0), 0.25, "below the low losses: they span less than 16-fold"),
        ((1.0, 2.0), (1.0, 2.0), 4.0, "above the low losses, as the factor is"),
    ],
)
def test_the_picture_says_why_a_rate_is_not_within_the_low_losses(interval, whole, rate, words, tmp_path):
    curve = curve_of([1.0, 0.9, 0.8, 1.1])
    factor = rate / math.sqrt(whole[0] * whole[1])
    found = hdet.FoundRate(
        rate, 1.0, ((rate,),), interval, whole, factor, 1.0, curve, curve, 9, 9, 9.0, 1.0, ("the loss fell by 1 %",)
    )
    found.plot(tmp_path / "found.svg")
    drawn = " ".join(re.findall(r"<!-- (.*?) -->", (tmp_path / "found.svg").read_text(), flags=re.S))
    assert f"found: {rate:.3g}, {factor:.2g} times it" in drawn
    assert "Not sure: the loss fell by 1 %." in drawn
    assert ("The rate is" in drawn) is (words is not None)
    assert (words or "") in drawn.replace("\n", " ")


@pytest.mark.parametrize("bad", [5, 50, 100])  # in the first ramp or, later than its 80 batches, in the second
def test_a_batch_that_is_not_finite_is_named_and_not_taken_for_a_rate_too_high(bad):
    model = make(kind=plain_net)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    before = everything(model, optimizer)
    step = {bad: math.nan}
    with pytest.raises(hdet.FindLRError, match=f"batch {bad} gives a gradient that is not finite"):
        find(model, optimizer, step_fn=lambda i: (step.get(i, 1.0) * loss_fn(model, batch(i))).backward())
    assert everything(model, optimizer) == before


def test_weights_that_overflow_are_a_rate_too_high():
    model = nn.Linear(6, 1, dtype=torch.float64)
    scores = find(model, optim.SGD(model.parameters(), lr=1.0)).coarse
    assert scores[-1][0] > 1
    linear = nn.Linear(6, 1)

    def step(index):  # finite at the initial weights, and not far from them
        x, y = batch(index, torch.float32)
        (linear(x).exp().exp() - y).square().mean().backward()

    probe = hdet.Probe(lambda i: [batch(-1, torch.float32)], lambda m, b: (m(b[0]).exp().exp() - b[1]).square().mean())
    found = hdet.find_lr(linear, optim.SGD(linear.parameters(), lr=1e-2), step, probe=probe)
    assert not math.isfinite(found.coarse[-1][1])


@pytest.mark.parametrize("too_high", [60.0, 1000.0])
def test_a_second_ramp_that_begins_too_high_begins_again_lower(monkeypatch, too_high):
    model = make(kind=plain_net)
    usual = find(model, optim.SGD(model.parameters(), lr=0.1))
    half_way = Coarse.half_way
    monkeypatch.setattr(Coarse, "half_way", lambda *args: too_high * half_way(*args))
    found = find(model, optim.SGD(model.parameters(), lr=0.1))
    assert found.rate == pytest.approx(usual.rate, rel=0.5)
    monkeypatch.setattr(sys.modules["hdet._find_lr.search"], "LOWER", (1,))
    with pytest.raises(hdet.FindLRError, match="less than 1 %"):
        find(model, optim.SGD(model.parameters(), lr=0.1))


def test_what_was_found_is_told_in_words_and_saved(tmp_path):
    curve = [(0.01, 2.0), (0.1, math.inf)]
    low = (0.01, 0.1)
    found = hdet.FoundRate(
        0.016, 16.0, ((0.016,),), low, low, 0.5, 2.5, curve, curve, 150, 900, 162.4, 9.0, total_steps=8000
    )  # fmt: skip
    assert str(found) == (
        "found 0.016, 16 times your rate; losses were low between 0.01 and 0.1; cost as much as 162 steps (9.0 s), "
        "2.0 % of the run"
    )
    found.save(tmp_path / "runs" / "first")
    told = json.loads((tmp_path / "runs" / "first" / "find_lr.json").read_text())
    assert (told["rate"], told["start"], told["sure"], told["coarse"][1]) == (0.016, 0.001, True, [0.1, None])
    from hdet_lab import cli

    assert cli.main(["report", str(tmp_path / "runs" / "first")]) == 0
    assert (tmp_path / "runs" / "first" / "report.html").stat().st_size > 50_000


def test_what_was_found_can_be_read_printed_and_drawn(tmp_path):
    model = make(kind=plain_net)
    found = find(model, optim.Adam(model.parameters(), lr=1e-3), factor=np.float32(2.0))
    assert type(found.rate) is type(found.factor) is float
    assert f"found {found.rate:.3g}, " in str(found)
    assert "\n" not in str(found)
    assert found.factor == 2.0
    assert found.cost > found.steps == 4 * len(found.coarse) + 8 * len(found.fine)
    assert found.samples == 3 * SAMPLES * (1 + len(found.coarse) + len(found.fine))
    assert pickle.loads(pickle.dumps(found)) == found
    found.plot(tmp_path / "found.png")
    assert (tmp_path / "found.png").stat().st_size > 1000


def test_drawing_without_matplotlib(monkeypatch, tmp_path):
    model = make(kind=plain_net)
    found = find(model, optim.Adam(model.parameters(), lr=1e-3))
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        found.plot(tmp_path / "found.png")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factor": 0}, "factor must be positive"),
        ({"total_steps": 0}, "total_steps must be at least 1"),
        ({"total_steps": 1e3}, "total_steps must be an int"),
        ({"outer_step": 0.0}, "outer_step must lie in"),
        ({"outer_step": True}, "outer_step must be a number"),
        ({"also": [3]}, "also must hold objects with state_dict"),
        ({"step_fn": 3}, "step_fn must be a function"),
        ({"probe": loss_fn}, "probe must be an hdet.Probe"),
        ({"optimizer": []}, "optimizer must be an optimizer"),
        ({"optimizer": 3}, "optimizer must be a torch.optim.Optimizer"),
    ],
)
def test_bad_arguments(options, message):
    model = make()
    good = {"optimizer": optim.SGD(model.parameters(), lr=1.0), "step_fn": print, "probe": make_probe()}
    with pytest.raises((TypeError, ValueError), match=message):
        hdet.find_lr(model, **{**good, **options})


def test_no_rate_and_lbfgs_are_refused():
    model = make()
    with pytest.raises(ValueError, match="must have a positive learning rate"):
        find(model, optim.SGD(model.parameters(), lr=0.0))
    with pytest.raises(ValueError, match="LBFGS"):
        find(model, optim.LBFGS(model.parameters()))


# The decisions, against a plain twin and against curves whose answer is known.


def twin(losses, first, every, width, scales, stage):
    """The whole test of one stage in one loop, on a known curve: the points taken."""
    taken, means = [], []
    for index, scale in enumerate(scales):
        if (index + 1) % every:
            continue
        taken.append((scale, losses(scale)))
        h = width // 2
        if len(taken) > h:
            window = [min(loss, 1.5 * first) for _, loss in taken[max(0, len(taken) - 1 - 2 * h) :]]
            means.append(sum(window) / len(window))
            best = min(means)
            if means[-1] > 1.02 * first or (best < 0.95 * first and means[-1] > best + (first - best) / 2):
                break
            times = {"fine": 4, "coarse": 30 if index + 1 >= 80 else math.inf}[stage]
            if best < 0.99 * first and scale >= times * taken[means.index(best)][0]:
                break
    return taken


def valley(bottom, width, depth=0.8):
    """1 far below `bottom`, 1 - depth there, and 2 far above; a parabola in the logarithm of the rate between."""

    def loss(rate):
        t = math.log(rate / bottom) / width
        return 1 - depth * max(0, 1 - t * t) if t < 1 else 1 + min(t - 1, 1.0)

    return loss


def rates(stage, start):
    return [rate for _, rate in stage.ramp(start)]


def walk(stage, scales, losses, first=1.0):
    curve = []
    for index, scale in enumerate(scales):
        if (index + 1) % stage.every == 0:
            curve.append((scale, losses(scale)))
            if stage.over(curve, first):
                break
    return curve


@pytest.mark.parametrize("bottom", [0.01, 0.3, 40.0])
@pytest.mark.parametrize("width", [2.0, 4.0])
@pytest.mark.parametrize(("total_steps", "every"), [(None, 8), (2000, 4), (10, 2)])
def test_a_known_valley(bottom, width, total_steps, every):
    losses = valley(bottom, width)
    coarse, fine = Coarse(), Fine(total_steps)
    first_curve = walk(coarse, rates(coarse, 1.0), losses)
    assert first_curve == twin(losses, 1.0, 4, 3, rates(coarse, 1.0), "coarse")
    half_way = coarse.half_way(first_curve, 1.0)
    expected = max(-width / math.sqrt(2), math.log(first_curve[0][0] / bottom))  # the ramp may begin in the valley
    assert math.log(half_way / bottom) == pytest.approx(expected, abs=0.5)
    curve = walk(fine, rates(fine, half_way), losses)
    assert curve == twin(losses, 1.0, every, 3, rates(fine, half_way), "fine")
    low, high = fine.interval(curve, 1.0)
    assert math.log(low / bottom) == pytest.approx(-width * math.sqrt(0.1), abs=0.1)
    assert math.log(high / bottom) == pytest.approx(width * math.sqrt(0.1), abs=0.1)
    assert math.sqrt(low * high) == pytest.approx(bottom, rel=0.1)


@pytest.mark.parametrize(
    ("total_steps", "valley"), [(None, 16.0), (80_000, 16.0), (8000, 16.0), (1000, 8.0), (1, 6.35)]
)
def test_a_narrow_valley_counts_as_one_that_goes_on_below(total_steps, valley):
    fine = Fine(total_steps)
    assert fine.valley == pytest.approx(valley, rel=1e-3)
    for width in (1.0, 2.0, 0.99 * fine.valley):
        low, high = fine.whole((3.0, 3.0 * width), last=1e9)
        assert high == 3.0 * width  # too high is too high for the run too
        assert high / low == pytest.approx(fine.valley)
    wide = (3.0, 3.0 * 1.01 * fine.valley)
    assert fine.whole(wide, last=1e9) == wide
    assert fine.whole((3.0, 6.0), last=6.0) == (3.0, 6.0)  # the ramp ended before the losses rose
    narrow = [fine.whole((rate, 2.0), last=3.0)[0] for rate in (0.5, 1.0, 1.9)]
    assert narrow == [narrow[0]] * 3  # where it is too fast the ramp's lo says nothing


def test_ramps_span_what_they_should():
    coarse = rates(Coarse(), 2.0)
    assert (coarse[0], coarse[79]) == (pytest.approx(2e-3, rel=0.1), pytest.approx(2e3, rel=0.1))
    fine = rates(Fine(), 8.0)
    assert (len(fine), fine[0], fine[25]) == (428, 2.0, pytest.approx(2 * math.e))  # twice as fast up to 8
    assert fine[100] == pytest.approx(fine[50] * math.e)
    for total_steps, steps in ((100_000, 428), (8000, 428), (2000, 214), (1, 107)):
        short = rates(Fine(total_steps), 8.0)
        assert (len(short), short[0]) == (steps, 2.0)
        assert math.log(short[-1] / fine[-1]) == pytest.approx(0, abs=0.16)  # the same span, within two steps


def test_coarse_ramps_from_all_starts_meet_the_same_batches_at_the_same_rates():
    batches = {}
    for start in (1e-9, 3.3e-4, 1e-2, 1.0, 7.7, 1e6):
        steps = Coarse().ramp(start)
        assert sorted(index for index, _ in steps[:80]) == list(range(80))
        assert {index % 4 for index, _ in steps[3::4]} == {3}  # those that are scored
        for index, rate in steps:
            assert batches.setdefault(f"{rate:.9e}", index) == index
    assert len(batches) < 6 * 160


def test_a_coarse_ramp_goes_on_until_the_valley_is_behind_it():
    """From a start so low that the 80 steps end on the slope, half of the drop would be taken for all of it."""
    losses = valley(2e4, 3.0)
    curve = walk(Coarse(), rates(Coarse(), 1.0), losses)
    assert curve[-1][0] > 2e4
    half_way = Coarse().half_way(curve, 1.0) / (2e4 * math.exp(-3 / math.sqrt(2)))
    assert 1 <= half_way < math.exp(4 * Coarse().growth)  # the first score after it
    assert len(walk(Coarse(), rates(Coarse(), 1.0), lambda rate: 1.0)) == 40


def test_a_ramp_ends_at_four_times_the_lowest_or_at_its_last_step():
    flat = walk(Fine(), rates(Fine(), 4.0), lambda rate: 0.5 if rate > 6 else 1.0)
    assert flat[-1][0] == pytest.approx(4 * next(r for r, _ in flat if r > 6), rel=0.3)
    assert Fine().interval(flat, 1.0)[1] == flat[-1][0]
    assert len(walk(Fine(), rates(Fine(), 4.0), lambda rate: 0.995)) == 428 // 8
    assert Fine().interval(walk(Fine(), rates(Fine(), 4.0), lambda rate: 0.995), 1.0) is None
    assert Coarse().half_way(walk(Coarse(), rates(Coarse(), 1.0), lambda rate: 1.0), 1.0) is None
    assert Coarse().half_way([], 1.0) is None


@pytest.mark.parametrize(
    ("values", "dead"),
    [
        ([], False),
        ([1.02], False),
        ([1.03], True),
        ([0.96, 1.0], False),
        ([0.5, 0.74], False),
        ([0.5, 0.76], True),
    ],
)
def test_dead(values, dead):
    assert is_dead(values, 1.0) is dead


def test_losses_that_are_not_finite_count_as_the_cap():
    assert smooth([(1, math.nan), (2, math.inf), (3, 9.0), (4, 0.0)], 2.0, 1) == [3.0, 3.0, 3.0, 0.0]


def half():
    return torch.autocast("cpu", torch.bfloat16)


def convolutional():
    torch.manual_seed(0)
    body = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten()
    return nn.Sequential(nn.Unflatten(1, (1, 6)), *body, nn.Linear(32, 1))


def squares(index):
    x = torch.randn(32, 6, 6, generator=torch.Generator().manual_seed(index))
    return x, torch.sin(x).sum((1, 2))[:, None]


def under_autocast(where, kind, search):
    """What is found with autocast within the functions, around the search, or both; and a forward pass around it."""
    model = convolutional()
    optimizer = kind(model.parameters(), lr=1e-2)

    def loss(model, pair):
        with half() if "within" in where else contextlib.nullcontext():
            return mse_loss(model(pair[0]).float(), pair[1])

    def step(index):
        loss(model, squares(index)).backward()

    with half() if "around" in where else contextlib.nullcontext():
        before = loss(model, squares(0)).item()
        found = search(model, optimizer, step, hdet.Probe(lambda index: [squares(-1), squares(-2)], loss))
        assert loss(model, squares(0)).item() == before
    return found


def by_ensemble(model, optimizer, step, probe):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ensemble = hdet.Ensemble(optimizer, total_steps=1000, controller=hdet.Auto(), model=model, probe=probe)
    found = ensemble.find_lr(step)
    ensemble.close()
    return found


@pytest.mark.parametrize("search", ["find_lr", "ensemble.find_lr"])
@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adafactor])  # the latter multiplies matrices in its step
def test_autocast_around_it_gives_the_answer_of_autocast_within_step_fn(kind, search):
    def alone(model, optimizer, step, probe):
        return hdet.find_lr(model, optimizer, step, probe=probe, total_steps=1000)

    run = alone if search == "find_lr" else by_ensemble
    within, around, both = (under_autocast(where, kind, run) for where in ("within", "around", "within and around"))
    assert (around.rate, around.coarse, around.fine) == (within.rate, within.coarse, within.fine)
    assert (both.rate, both.coarse, both.fine) == (within.rate, within.coarse, within.fine)


def with_unshared_gradients():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    o = torch.optim.SGD(model.parameters(), lr=1e-3)
    rank = hdet.find_replicas().rank

    def step(index):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(2 * index + rank))
        (model(x) - 1).square().mean().backward()

    probe = hdet.Probe(lambda index: [torch.ones(4, 3)] * 2, lambda m, x: (m(x) - 1).square().mean())
    hdet.find_lr(model, o, step, probe=probe)


def test_replicas_that_do_not_share_their_gradients_are_refused():
    with pytest.raises(hdet.ReplicaError, match="differs from replica 0 after one step"):
        hdet.in_process(with_unshared_gradients, 2)


def interrupted(kind):
    """Every replica is interrupted in mid-ramp, under real DDP."""
    replicas = hdet.find_replicas()
    model = DistributedDataParallel(make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before, taken = everything(model, optimizer), itertools.count()

    def step(index):
        x, y = batch(index)
        loss_fn(model, (x[replicas.rank :: 2], y[replicas.rank :: 2])).backward()
        if next(taken) == 50:
            raise kind

    with pytest.raises(kind):
        hdet.find_lr(model, optimizer, step, probe=make_probe())
    return everything(model, optimizer) == before


@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt])
def test_everything_is_put_back_on_every_replica(kind):
    assert run(interrupted, 2, kind) == [True, True]


@pytest.mark.parametrize("before_it", [False, True])
def test_an_interrupt_while_everything_is_put_back_waits_until_it_is(before_it, monkeypatch):
    """Ctrl-C as the restoring begins: of a search that was done, or that had been interrupted already."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before, restore = everything(model, optimizer), Weights.restore

    def interrupted(weights):
        signal.raise_signal(signal.SIGINT)
        restore(weights)

    def step(index):
        loss_fn(model, batch(index)).backward()
        if before_it:
            raise KeyboardInterrupt

    monkeypatch.setattr(Weights, "restore", interrupted)
    with pytest.raises(KeyboardInterrupt):
        find(model, optimizer, step_fn=step)
    assert everything(model, optimizer) == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_step_fn_that_takes_steps_is_refused():
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = everything(model, optimizer)

    def step(index):
        loss_fn(model, batch(index)).backward()
        optimizer.step()

    with pytest.raises(ValueError, match=r"what it was given called SGD\.step\(\): let step_fn end with backward"):
        find(model, optimizer, step_fn=step)
    assert everything(model, optimizer) == before


def test_the_cost_is_that_of_the_clock():
    """Steps and scores that take known times: as many steps of training as the whole search lasted."""
    model = make(kind=plain_net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    spent = {"steps": [], "scores": []}

    def slowly(kind, seconds, work):
        began = time.perf_counter()
        time.sleep(seconds)
        result = work()
        spent[kind].append(time.perf_counter() - began)
        return result

    probe = hdet.Probe(lambda index: [batch(-1)], lambda model, b: slowly("scores", 0.02, lambda: loss_fn(model, b)))
    step = lambda index: slowly("steps", 0.004, lambda: loss_fn(model, batch(index)).backward())  # noqa: E731
    found = hdet.find_lr(model, optimizer, step, probe=probe, total_steps=1000)
    whole = sum(spent["steps"]) + sum(spent["scores"])
    assert found.cost == pytest.approx(whole / (sum(spent["steps"]) / found.steps), rel=0.2)
    assert found.cost > 1.5 * found.steps
    assert found.seconds >= 0.99 * whole
