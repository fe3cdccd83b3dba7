"""Saving and loading a run on real processes: exactness, agreement, refusals, what is kept."""

import dataclasses
import fcntl
import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import saved_run
import torch
import torch.distributed as dist
from cases import OPTIMIZERS, SCHEDULERS, Net, batch
from processes import run
from torch import nn

import hdet
from hdet.checkpoint import folder, in_use, random_state


def names(path):
    return sorted(os.listdir(path))


# Exactness


def save_and_resume(path, stop, options):
    whole = saved_run.parts(**options)
    saved_run.train(whole, range(stop))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved = hdet.save(path, whole)
    mid_round = whole["ensemble"].mid_round
    saved_run.train(whole, range(stop, 14))
    again = saved_run.parts(**options)
    loaded = hdet.load(path, again)
    assert loaded.exact
    assert whole["ensemble"].last_checkpoint == again["ensemble"].last_checkpoint == str(saved)
    assert not loaded.notices
    assert (loaded.step, loaded.replicas, loaded.mid_round) == (stop, 2, mid_round)
    saved_run.train(again, range(stop, 14))
    assert saved_run.bits(again) == saved_run.bits(whole)
    for one in (whole, again):
        one["ensemble"].finish()
    return mid_round


HALF = hdet.Averaging(outer_step=0.5)


@pytest.mark.parametrize(
    ("stop", "options"),
    [
        (8, {}),
        (6, {}),
        (6, {"averaging": HALF}),
        (0, {}),
        (6, {"safety": hdet.Safety(rollback=hdet.Rollback(window=8))}),
        (6, {"gradients": "local"}),
        (6, {"spread": 0.0, "averaging": HALF, "safety": hdet.Safety(rollback=hdet.Rollback(window=8))}),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, stop, options):
    """The last one: with a spread of 0 replicas hold the same weights and have other losses."""
    differ = stop % 4 > 0 and options.get("spread") != 0
    assert run(save_and_resume, 2, str(tmp_path), stop, options) == [differ] * 2
    files = names(tmp_path / f"000001-step-{stop}")
    common = not differ or "averaging" in options  # all of it, or where the round began, which is the same on all
    assert files == ["checkpoint.json", "replica-0.pt", "replica-1.pt"] + ["shared.pt"] * common


def drop_in(path):
    def make():
        torch.manual_seed(0)
        model = hdet.data_parallel(nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.2), nn.Linear(4, 2)))
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = hdet.OneCycleAutoLR(
            optimizer, max_lr=0.01, total_steps=12, ensemble_lr_spread_ratio=0.3, model_sync_interval=4,
            enable_auto_lr=True, auto_lr_warmup_steps=3, model=model,
        )  # fmt: skip
        torch.manual_seed(dist.get_rank())
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    def train(parts, steps):
        for step in steps:
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
            loss = parts["model"](x).square().mean()
            loss.backward()
            parts["optimizer"].step()
            parts["optimizer"].zero_grad()
            parts["scheduler"].step(loss)
        return [p.detach().clone() for p in parts["model"].parameters()]

    whole, again = make(), make()
    train(whole, range(6))
    hdet.save(path, whole)
    last = train(whole, range(6, 12))
    hdet.load(path, again)
    return all(torch.equal(a, b) for a, b in zip(last, train(again, range(6, 12)), strict=True))


def test_the_drop_in_scheduler_is_saved_with_its_ensemble(tmp_path):
    assert run(drop_in, 2, str(tmp_path)) == [True, True]


def two_runs(path):
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]

    def make():
        torch.manual_seed(rank // 2)
        model = nn.parallel.DistributedDataParallel(nn.Linear(6, 2), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        explored = [hdet.learning_rate(optimizer, spread=0.3)]
        ensemble = hdet.Ensemble(optimizer, explored, interval=4, total_steps=8, replicas=group)
        return {"model": model, "optimizer": optimizer, "ensemble": ensemble}

    parts, again = make(), make()
    for _ in range(2):
        loss = parts["model"](torch.ones(1, 6)).sum()
        loss.backward()
        parts["optimizer"].step()
        parts["ensemble"].step(loss)
    hdet.save(f"{path}/{rank // 2}", parts)
    loaded = hdet.load(f"{path}/{rank // 2}", again)
    assert torch.equal(parts["model"].module.weight, again["model"].module.weight)
    for one in (parts, again):
        one["ensemble"].finish()
    return loaded.replicas, loaded.exact, parts["model"].module.weight[0, 0].item()


def test_the_ensembles_replicas_save_and_load_together(tmp_path):
    results = run(two_runs, 4, str(tmp_path))
    assert [result[:2] for result in results] == [(2, True)] * 4
    assert results[0][2] != results[2][2]


class Position:
    """A user's object, this replica's own."""

    def __init__(self):
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        if state["at"] > 100:
            raise KeyError("no such position")
        self.at = state["at"]


def all_kinds(path):
    parts, data = saved_run.parts(), Position()
    muon = [torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1 * k, momentum=0.9) for k in (1, 2)]
    history = torch.arange(5.0)
    data.at = 10 + dist.get_rank()
    hdet.save(path, {**parts, "muon": muon, "history": history, "epoch": 3}, own={"data": data, "mine": data.at})
    fresh, again = Position(), torch.zeros(5)
    muon[1].param_groups[0]["lr"] = 7.0
    loaded = hdet.load(path, {**parts, "muon": muon, "history": again, "epoch": 0}, own={"data": fresh})
    return loaded.values, fresh.at, again.tolist(), muon[1].param_groups[0]["lr"]


def test_all_kinds_of_entries_come_back(tmp_path):
    for rank, (values, at, history, lr) in enumerate(run(all_kinds, 2, str(tmp_path))):
        assert values == {"epoch": 3, "mine": 10 + rank}
        assert at == 10 + rank
        assert history == [0, 1, 2, 3, 4]
        assert lr == 0.2


def test_optimizer_state_of_another_precision_keeps_it(tmp_path):
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = torch.full((3,), 1 / 3)
    hdet.save(tmp_path, {"optimizer": optimizer}, step=1)
    optimizer.state.clear()
    hdet.load(tmp_path, {"optimizer": optimizer})
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], torch.full((3,), 1 / 3))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler_comes_back(tmp_path, scheduler):
    if SCHEDULERS[scheduler] is None:
        return
    steps = {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)}
    steps["scheduler"] = SCHEDULERS[scheduler](steps["optimizer"])
    take_steps(steps, 3)
    hdet.save(tmp_path, steps, step=3)
    take_steps(steps, 3)
    again = {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)}
    again["scheduler"] = SCHEDULERS[scheduler](again["optimizer"])
    hdet.load(tmp_path, again)
    take_steps(again, 3)
    assert again["optimizer"].param_groups[0]["lr"] == steps["optimizer"].param_groups[0]["lr"]


def take_steps(parts, count):
    for _ in range(count):
        parts["optimizer"].step()
        plateau = isinstance(parts["scheduler"], torch.optim.lr_scheduler.ReduceLROnPlateau)
        parts["scheduler"].step(*[1.0] * plateau)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_comes_back(tmp_path, optimizer):
    def make():
        torch.manual_seed(0)
        model = Net()
        return {"model": model, "optimizer": OPTIMIZERS[optimizer](model)}

    def train(parts, steps):
        for step in steps:
            x, y = batch(0, step)
            nn.functional.mse_loss(parts["model"](x), y).backward()
            for one in parts["optimizer"]:
                one.step()
                one.zero_grad()
        return [t.clone() for t in parts["model"].state_dict().values()]

    whole, again = make(), make()
    train(whole, range(3))
    hdet.save(tmp_path, whole, step=3)
    last = train(whole, range(3, 6))
    hdet.load(tmp_path, again)
    assert all(torch.equal(a, b) for a, b in zip(last, train(again, range(3, 6)), strict=True))


def explored_in_the_model(path, stop):
    def make():
        torch.manual_seed(0)
        model = Net()
        del model.heat
        model.register_buffer("heat", torch.tensor(2.0))
        model = hdet.data_parallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        heat = hdet.attribute(model.module, "heat", spread=0.3, bounds=(0.1, 10))
        ensemble = hdet.Ensemble(optimizer, [heat], interval=3, total_steps=9, gradients="local", model=model)
        return {"model": model, "optimizer": optimizer, "ensemble": ensemble}

    def train(parts, steps):
        for step in steps:
            x, y = batch(dist.get_rank(), step)
            loss = nn.functional.mse_loss(parts["model"](x), y)
            loss.backward()
            parts["optimizer"].step()
            parts["optimizer"].zero_grad()
            parts["ensemble"].step(loss)
        return [t.clone() for t in parts["model"].module.state_dict().values()]

    whole, again = make(), make()
    train(whole, range(stop))
    hdet.save(path, whole)
    heat = whole["model"].module.heat.item()
    last = train(whole, range(stop, 8))
    hdet.load(path, again)
    assert again["model"].module.heat.item() == heat
    same = all(torch.equal(a, b) for a, b in zip(last, train(again, range(stop, 8)), strict=True))
    for parts in (whole, again):
        parts["ensemble"].finish()
    return same, heat


@pytest.mark.parametrize("stop", [3, 4])
def test_what_is_explored_in_the_model_is_each_replicas_own(tmp_path, stop):
    (first, heat), (second, other) = run(explored_in_the_model, 2, str(tmp_path), stop)
    assert heat != other
    assert first
    assert second


def test_the_gpus_generators_come_back_where_the_replica_trains(monkeypatch):
    states = {0: torch.tensor([1]), 1: torch.tensor([2])}
    gpus = {"now": 1}
    cuda = {
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: gpus["now"],
        "get_rng_state_all": lambda: list(states.values()),
        "set_rng_state_all": lambda found: states.update(enumerate(found)),
        "set_rng_state": lambda found: states.update({gpus["now"]: found}),
    }
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    saved = random_state.take()
    states.update({0: torch.tensor([0]), 1: torch.tensor([0])})
    random_state.put(saved)
    assert [s.item() for s in states.values()] == [1, 2]
    gpus["now"] = 0  # started again, with another local rank
    random_state.put(saved)
    assert [s.item() for s in states.values()] == [2, 2]


# What is kept, what is taken


def linear(value=0.0):
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, value)
    return model


def test_the_newest_are_kept(tmp_path):
    for step in range(5):
        saved = hdet.save(tmp_path, {"model": linear(step)}, step=step, keep=2)
    assert saved == tmp_path / "000005-step-4"
    assert names(tmp_path) == ["000004-step-3", "000005-step-4"]
    model = linear()
    assert hdet.load(tmp_path / "000004-step-3", {"model": model}).step == 3
    assert model.weight[0, 0] == 3


def test_without_a_checkpoint_there_is_nothing_to_load(tmp_path):
    assert hdet.load(tmp_path / "nowhere", {"model": linear()}) is None


def flip(file, place=-1):
    data = bytearray(file.read_bytes())
    data[place if place >= 0 else len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("file", ["shared.pt", "replica-0.pt", "checkpoint.json"])
def test_a_flipped_bit_is_seen_and_the_checkpoint_before_is_taken(tmp_path, file):
    for step in (1, 2, 3):
        newest = hdet.save(tmp_path, {"model": linear(step)}, step=step)
    flip(newest / file)
    model = linear()
    with pytest.warns(UserWarning, match=f"000003-step-3, replica 0: .*{file}"):
        loaded = hdet.load(tmp_path, {"model": model})
    assert (loaded.step, model.weight[0, 0].item()) == (2, 2)
    assert "cannot be verified" in loaded.notices[0]
    for step in (1, 2):
        (tmp_path / f"00000{step}-step-{step}" / "checkpoint.json").unlink()
    with (
        pytest.warns(UserWarning, match="cannot be verified"),
        pytest.raises(RuntimeError, match="none of 3 can be verified"),
    ):
        hdet.load(tmp_path, {"model": model})
    assert model.weight[0, 0] == 2
    with pytest.warns(UserWarning, match="cannot"), pytest.raises(RuntimeError, match="none of 1"):
        hdet.load(tmp_path / "000001-step-1", {"model": model})  # not a fresh start
    # what is damaged does not push out what is whole
    hdet.save(tmp_path, {"model": linear(4)}, step=4, keep=1)
    assert hdet.load(tmp_path, {"model": model}).step == 4


def one_damaged_file(path):
    parts = saved_run.parts()
    for first in (0, 3):
        saved_run.train(parts, range(first, first + 3))
        saved = hdet.save(path, parts)
    if dist.get_rank() == 0:
        flip(saved / "replica-1.pt")  # which only replica 1 reads
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = hdet.load(path, parts)
    parts["ensemble"].finish()
    return loaded.step, [str(w.message) for w in caught]


def test_all_replicas_take_the_same_checkpoint(tmp_path):
    for step, said in run(one_damaged_file, 2, str(tmp_path)):
        assert step == 3
        assert len(said) == 1
        assert "replica 1: the checksum of replica-1.pt is wrong" in said[0]


# What is refused


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({"model": nn.Linear(4, 5)}, r"entry 'model': weight is \(4, 4\) torch.float32 in the checkpoint, \(5, 4\)"),
        ({"model": nn.Linear(4, 4).double()}, r"weight is \(4, 4\) torch.float32 in the checkpoint, .*float64 here"),
        ({"model": nn.Linear(4, 4, bias=False)}, "bias is in the checkpoint only"),
        ({"model": nn.Sequential(nn.Linear(4, 4))}, r"0.weight is missing in the checkpoint"),
        ({"net": nn.Linear(4, 4)}, r"there is no entry 'net' in it, but \['data', 'history', 'model', 'optimizer'\]"),
        ({"optimizer": torch.optim.SGD([torch.ones(1)])}, "a Adam was saved, this is a SGD"),
        ({"optimizer": torch.optim.Adam([torch.ones(4, 4)])}, r"groups of \[2\] parameters were saved, this has \[1\]"),
        ({"optimizer": torch.optim.Adam([torch.ones(4, 4), torch.ones(3)])}, r"\[4\].* was saved where .*\[3\]"),
        ({"data": torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)]), 1)}, "a Position was saved"),
        ({"history": torch.ones(2)}, r"it is \(3,\) torch.float32 in the checkpoint, \(2,\)"),
        ({"history": nn.Linear(3, 1)}, "a tensor was saved, this is a module"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path, entries, match):
    model, data, history = linear(1), Position(), torch.ones(3)
    optimizer = torch.optim.Adam(model.parameters())
    hdet.save(tmp_path, {"model": model, "optimizer": optimizer, "data": data, "history": history}, step=1)
    mine, other = Position(), linear(2)
    mine.at = 5
    here = {"data": mine, "history": torch.zeros(3), "model": other, **entries}
    with pytest.raises(ValueError, match=f"nothing has changed; it does not fit: replica 0 says: .*{match}"):
        hdet.load(tmp_path, here)
    assert mine.at == 5
    assert other.weight[0, 0] == 2


def refused_by_an_object(path):
    parts, data, other = saved_run.parts(), Position(), Position()
    data.at = 1 + 200 * dist.get_rank()
    hdet.save(path, parts, own={"other": other, "data": data})
    saved_run.train(parts, range(2))
    other.at, data.at = 9, 9
    before = saved_run.bits(parts)
    with pytest.raises(RuntimeError) as caught:
        hdet.load(path, parts, own={"other": other, "data": data})
    assert saved_run.bits(parts) == before
    assert (other.at, data.at) == (9, 9)
    parts["ensemble"].finish()
    return str(caught.value)


def test_an_object_that_refuses_its_state_on_one_replica_changes_nothing_on_any(tmp_path):
    first, second = run(refused_by_an_object, 2, str(tmp_path))
    assert first == second
    assert "nothing has changed: replica 1 says: KeyError: 'no such position'" in first


@pytest.mark.parametrize(
    ("entries", "options", "match"),
    [
        ({"x": np.float64(1)}, {}, r"x must be a tensor, a plain number .* got numpy.float64"),
        ({"x": {"a": [1, {2}]}}, {}, r"x\['a'\]\[1\] must be .* got builtins.set"),
        ({"x": lambda: 1}, {}, "x must be"),
        ({"x": 1}, {"step": None}, "step must be given if there is no ensemble"),
        ({"x": 1}, {"step": -1}, "step must be at least 0"),
        ({"x": 1}, {"keep": 0}, "keep must be at least 1 checkpoints"),
        ({"x": 1}, {"own": {"x": 2}}, r"own must have other names than entries, got \['x'\]"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(tmp_path, entries, options, match):
    hdet.save(tmp_path, {"x": 0}, step=1)
    with pytest.raises(ValueError, match=match):
        hdet.save(tmp_path, entries, **{"step": 1, **options})
    assert names(tmp_path) == ["000001-step-1"]
    with pytest.raises(TypeError, match="entries must be a mapping"):
        hdet.save(tmp_path, [1], step=1)


def different(path):
    texts = []
    for entries, step in (({"x": 1, f"y{rank() % 2}": 1}, 1), ({"x": 1}, rank())):
        with pytest.raises(ValueError, match="was not saved") as caught:
            hdet.save(path, entries, step=step)
        texts.append(str(caught.value))
    return texts


def rank():
    return dist.get_rank()


def test_replicas_that_save_different_things_are_told(tmp_path):
    first, second = run(different, 2, str(tmp_path / "a"))
    assert first == second
    assert "the entries is {'x': 'value', 'y1': 'value'} on replica 1" in first[0]
    assert "the step is 1 on replica 1, 0 on replica 0" in first[1]
    assert not (tmp_path / "a").exists()


def full_disk(path, where):
    entries = {"model": nn.Linear(100, 100)}
    hdet.save(path, entries, step=1, own={"big": torch.zeros(20_000)})
    if rank() == where:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    with pytest.raises(RuntimeError, match="was not saved") as caught:
        hdet.save(path, entries, step=2, own={"big": torch.zeros(20_000)})
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert hdet.load(path, entries, own={}).step == 1
    hdet.save(path, entries, step=3)
    return str(caught.value)


@pytest.mark.parametrize("where", [0, 1])
def test_a_full_disk_on_one_replica_fails_on_all_and_leaves_the_rest(tmp_path, where):
    first, second = run(full_disk, 2, str(tmp_path), where)
    assert first == second
    assert f"replica {where} says: the file is too large for this disk (File too large): " in first
    assert f".pt needs about 0.{1 if where else 0} MB in {tmp_path}; make room" in first
    assert names(tmp_path) == ["000001-step-1", "000002-step-3"]


def forged(path, change, optimizer_class=torch.optim.AdamW, **options):
    """Save, let `change` forge the optimizer's state in the file, and load into a fresh model; the error, if any."""
    options = {"lr": 0.01, **options}

    def make():
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        parameters = [p for p in model.parameters() if p.dim() == 2 or optimizer_class is not torch.optim.Muon]
        return {"model": model, "optimizer": optimizer_class(parameters, **options)}

    entries = make()
    for _ in range(2):
        entries["model"](torch.ones(5, 4)).square().sum().backward()
        entries["optimizer"].step()
    saved = hdet.save(path, entries, step=1)
    manifest = folder.read_manifest(saved)
    content = folder.read(saved, folder.SHARED, manifest)
    change(content["entries"]["optimizer"]["state"]["state"])
    (saved / folder.SHARED).unlink()
    written = folder.write(saved / folder.SHARED, content)
    (saved / "checkpoint.json").write_bytes(
        folder.signed(dataclasses.replace(manifest, files={**manifest.files, folder.SHARED: written}))
    )
    fresh = make()
    before = [t.clone() for t in fresh["model"].state_dict().values()]
    try:
        hdet.load(path, fresh)
    except ValueError as error:
        assert all(torch.equal(a, b) for a, b in zip(before, fresh["model"].state_dict().values(), strict=True))
        assert not any(fresh["optimizer"].state.get(p) for p in fresh["model"].parameters() if p.dim() > 1)
        return str(error)
    fresh["model"](torch.ones(5, 4)).square().sum().backward()
    fresh["optimizer"].step()
    return None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s[0].update(exp_avg=torch.zeros(2, 2)),
         r"exp_avg of the parameter '0.weight' is \(2, 2\) in the checkpoint, and must be \(3, 4\)"),
        (lambda s: s[0].update(exp_avg_sq=torch.zeros(4)), r"exp_avg_sq of the parameter '0.weight' is \(4,\)"),
        (lambda s: s[3].pop("exp_avg_sq"), r"the parameter '1.bias' has no exp_avg_sq in the checkpoint, which AdamW"),
        (lambda s: s[3].pop("step"), r"the parameter '1.bias' has no step"),
        (lambda s: s[1].update(step=torch.zeros(3)), r"step of the parameter '0.bias' is \(3,\).*must be one number"),
        (lambda s: s[0].update(exp_avg=torch.zeros(3, 4).long()), r"exp_avg of .* is \(3, 4\) of torch.int64"),
        (lambda s: s[1].update(exp_avg=1.0), r"exp_avg of the parameter '0.bias' is a float"),
        (lambda s: s.update({2: 5}), r"the state of the parameter '1.weight' is a int"),
        (lambda s: s[0].update(exp_avg=torch.zeros(3, 4).to_sparse()), r"exp_avg of .* without plain values"),
        (lambda s: s[0].update(exp_avg=torch.zeros(3, 4, device="meta")), r"exp_avg of .* without plain values"),
        (lambda s: s[0].update(exp_avg=torch.zeros(3, 4, dtype=torch.cfloat)), r"\(3, 4\) of torch.complex64"),
    ],
)  # fmt: skip
def test_optimizer_state_that_does_not_fit_is_refused(tmp_path, change, says):
    assert re.search(says, forged(tmp_path, change) or "loaded")


class Factored(torch.optim.SGD):
    """An optimizer of somebody's own, whose second moments are one number for each row."""

    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("exp_avg", torch.zeros_like(p))
            state.setdefault("exp_avg_sq", torch.zeros(len(p)))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("Adam", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "Rprop", "ASGD", "SGD")),
        ("Adam", {"amsgrad": True}), ("AdamW", {"fused": True}), ("SGD", {"momentum": 0.9}), ("Adafactor", {}),
        ("RMSprop", {"momentum": 0.9, "centered": True}), ("Muon", {}), ("Adam", {"foreach": True}),
        (Factored, {}),
    ],
)  # fmt: skip
def test_optimizer_state_of_all_kinds_is_loaded(tmp_path, name, options):
    kind = getattr(torch.optim, name) if isinstance(name, str) else name
    assert forged(tmp_path, lambda state: None, kind, **options) is None
    assert forged(tmp_path, lambda state: state.pop(0, None), kind, **options) is None  # one without a gradient


SAVING = """
import sys, time, torch, hdet
from torch import nn
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ensemble = hdet.Ensemble(optimizer, [hdet.learning_rate(optimizer)], total_steps=9, interval=3)
hdet.save(sys.argv[1], {"model": model, "ensemble": ensemble}, step=1)
print("saved", flush=True)
sys.stdin.readline()
{then}
print("over", flush=True)
sys.stdin.readline()
"""


def second_run(path, go_on):
    """What a run of two replicas is told while another process saves there, and once that is over."""
    parts = saved_run.parts()
    saved_run.train(parts, range(4))
    told = []
    in_use.PATIENCE = 1.0  # with the default one the test would take minutes
    for _ in range(2):
        try:
            hdet.save(path, parts, step=4)
            told.append("saved")
        except RuntimeError as error:
            told.append(str(error))
        hdet.load(path, saved_run.parts()) if told[-1] == "saved" else None  # which never needs the lock
        pathlib.Path(f"{path}.told-{rank()}").touch()
        while not os.path.exists(go_on):
            time.sleep(0.05)
    hdet.save(path, parts, step=4)  # once more, from the same process
    parts["ensemble"].close()
    return told


@pytest.mark.parametrize("then", ["ensemble.finish()", "ensemble.close()", "del ensemble", "kill"])
def test_two_runs_do_not_save_to_one_folder(tmp_path, then):
    path, go_on = tmp_path / "saved", tmp_path / "go-on"
    code = SAVING.replace("{then}", "" if then == "kill" else then)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, str(path)], **pipes) as other, ThreadPoolExecutor(1) as thread:
        assert other.stdout.readline() == "saved\n"
        found = thread.submit(run, second_run, 2, str(path), str(go_on))
        while not os.path.exists(f"{path}.told-0") and not found.done():
            time.sleep(0.05)
        if then == "kill":
            other.kill()
            other.wait()
        else:
            other.stdin.write("\n")
            other.stdin.flush()
            assert other.stdout.readline() == "over\n"
        go_on.touch()
        first, second = found.result()
        other.kill()
    assert first == second
    assert f"replica 0 says: another run, in another process, saves to {path}: give each run a folder" in first[0]
    if sys.platform == "linux":
        assert f"end the other one first (process {other.pid}, or in a notebook" in first[0]
    assert first[1] == "saved"
    assert names(path) == ["000001-step-1", "000002-step-4", "000003-step-4"]  # no file of a lock


def test_a_forked_process_does_not_hold_a_folder(tmp_path):
    """A data loader's worker may outlive the run for some seconds."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ensemble = hdet.Ensemble(optimizer, [hdet.learning_rate(optimizer, spread=0.0)], total_steps=9, interval=3)
    hdet.save(tmp_path, {"model": model, "ensemble": ensemble})
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    try:
        ensemble.close()
        code = f"import hdet; hdet.save({str(tmp_path)!r}, {{'x': 1}}, step=1)"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def lone_ensemble():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ensemble = hdet.Ensemble(optimizer, [hdet.learning_rate(optimizer, spread=0.0)], total_steps=9, interval=3)
    return {"model": model, "ensemble": ensemble}


def free(path):
    """Whether another process could save there; the lock is that of an open file, not of a process."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="open files are counted there")
def test_a_run_holds_only_the_folder_that_it_saved_to_last(tmp_path):
    """Integrations write each checkpoint to a folder of its own."""
    parts = lone_ensemble()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(30):
        hdet.save(tmp_path / f"step-{number}", parts)
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert free(tmp_path / "step-28")
    assert not free(tmp_path / "step-29")
    other = lone_ensemble()
    for number in range(30, 33):  # folders that were removed are not held by whoever saved there
        hdet.save(tmp_path / f"step-{number}", parts)
        shutil.rmtree(tmp_path / f"step-{number}")
    hdet.save(tmp_path / "step-28", other)
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    for one in (parts, other):
        one["ensemble"].close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_newest_run_of_a_process_has_the_folder(tmp_path):
    """A notebook's cell is run again while something still refers to the ensemble of the first time."""
    first, second = lone_ensemble(), lone_ensemble()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hdet.save(tmp_path, first)
        hdet.save(tmp_path, second)
        first["ensemble"].close()
        assert not free(tmp_path)
        hdet.save(tmp_path, {"x": 1}, step=1)  # of no run: the folder stays the second one's
    assert not free(tmp_path)
    second["ensemble"].close()
    assert free(tmp_path)
    kept = lone_ensemble()
    hdet.save(tmp_path, kept)
    hdet.save(tmp_path, second := lone_ensemble())
    second["ensemble"].close()
    assert free(tmp_path)  # although the first one lives
    kept["ensemble"].close()


def test_what_is_left_of_a_run_that_was_restarted_is_waited_for(tmp_path):
    code = SAVING.replace("{then}", "time.sleep(4); import os; os._exit(1)")
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "saved\n"
        other.stdin.write("\n")
        other.stdin.flush()
        with pytest.warns(UserWarning, match=r"another run \(.*\) saves to .* waiting up to 20 s for it to end"):
            hdet.save(tmp_path, {"x": 1}, step=2)
    assert names(tmp_path) == ["000001-step-1", "000002-step-2"]


def in_consensus(path):
    parts = saved_run.parts()
    saved_run.train(parts, range(2))
    with parts["ensemble"].consensus(), pytest.raises(RuntimeError, match="leave it first"):
        hdet.save(path, parts)
    with pytest.warns(UserWarning, match="model.state_dict"):  # still said to whom it concerns
        parts["model"].state_dict()
    parts["ensemble"].finish()


def test_the_average_is_no_state_to_resume_from(tmp_path):
    run(in_consensus, 2, str(tmp_path))


def test_leftovers_of_a_kill_are_cleared_away(tmp_path):
    (tmp_path / ".unfinished-abc").mkdir()
    (tmp_path / ".unfinished-abc" / "shared.pt").write_bytes(b"1")
    hdet.save(tmp_path, {"x": 1}, step=1)
    assert names(tmp_path) == ["000001-step-1"]


def test_another_version_of_the_format_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "VERSION", 2)
    hdet.save(tmp_path, {"x": 1}, step=1)
    monkeypatch.undo()
    with (
        pytest.warns(UserWarning, match="cannot be verified"),
        pytest.raises(RuntimeError, match="version 2 of the format, and this hdet reads 1"),
    ):
        hdet.load(tmp_path, {"x": 1})
