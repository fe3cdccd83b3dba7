"""The code of the guides in docs/ runs as it is. The controller goes through the table in test_controllers.py too."""

import os
import pathlib
import re
import warnings

import saved_run
import torch
from processes import run
from torch import nn

import hdet

DOCS = pathlib.Path(__file__).parent.parent / "docs"


def blocks(guide):
    return re.findall(r"```python\n(.*?)```", (DOCS / guide).read_text(), flags=re.S)


BLOCKS = blocks("controllers.md")


def follow():
    torch.manual_seed(0)
    rank = hdet.find_replicas().rank
    model = hdet.data_parallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def loss_of(model, x):
        return nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))

    def loss(index):
        return loss_of(model, torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * index + rank)))

    samples = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    names = {
        "model": model,
        "optimizer": optimizer,
        "total_steps": 1200,
        "probe": hdet.Probe(samples, loss_of),
        "step_fn": lambda index: loss(index).backward(),
    }
    for block in BLOCKS:
        exec(block, names)
    ensemble = names["ensemble"]
    for step in range(60):
        loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step(loss(step))
    scales = ensemble.scales
    ensemble.finish()
    return names["found"].rate, scales


def test_the_guides_code_runs():
    first, second = hdet.in_process(follow, 2)
    assert first == second
    assert 1e-3 < first[0] < 10
    assert all(scale not in (0.0, 1.0) for scale in first[1].values())


def test_a_controller_takes_no_more_than_twenty_lines():
    body = BLOCKS[0].partition("class ")[2].strip().splitlines()
    assert len(body) <= 20


class Data:
    """A position in the data, as a stateful loader has one."""

    def __init__(self, at):
        self.at = at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def save_and_load(folder, total_steps):
    os.chdir(folder)
    warnings.simplefilter("ignore")
    parts = saved_run.parts(interval=10, total_steps=200)
    rank = hdet.find_replicas().rank

    def train_step(step):
        loss = nn.functional.mse_loss(parts["model"](torch.ones(4, 6) * step), torch.ones(4, 2))
        loss.backward()
        parts["optimizer"].step()
        parts["optimizer"].zero_grad()
        parts["scheduler"].step()
        return loss

    data = Data(rank)
    names = {"hdet": hdet, "total_steps": total_steps, "train_step": train_step, "data": data, "print": lambda *_: None}
    names |= parts
    first, second, save, load = blocks("checkpoints.md")
    exec(first, names)
    exec(second, names)
    assert names["resumed"].values["epoch"] == 3
    assert data.at == rank
    exec(save, names)
    before = [p.detach().clone() for p in parts["model"].parameters()]
    train_step(0)
    exec(load, names)
    assert all(torch.equal(a, b) for a, b in zip(before, parts["model"].parameters(), strict=True))
    return names["first_step"], names["resumed"].mid_round


def test_the_code_about_checkpoints_runs(tmp_path):
    assert run(save_and_load, 2, str(tmp_path), 55) == [(0, True)] * 2
    assert run(save_and_load, 2, str(tmp_path), 60) == [(55, False)] * 2


def follow_safety():
    torch.manual_seed(0)
    rank = hdet.find_replicas().rank
    model = hdet.data_parallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    data = torch.randn(20 + 3 * rank, 4, generator=torch.Generator().manual_seed(rank))
    names = {
        "model": model,
        "optimizer": optimizer,
        "total_steps": 30,
        "loader": [(x, x.sum(1, keepdim=True)) for x in data.split(1)],
        "loss_fn": nn.functional.mse_loss,
    }
    for block in blocks("safety.md"):
        exec(block, names)
    return names["ensemble"].engine.run.rounds.at.step, [p.tolist() for p in model.parameters()]


def test_the_code_about_safety_runs():
    first, second = run(follow_safety, 2)
    assert first == second
    assert first[0] == 23


def follow_machines():
    torch.manual_seed(0)
    model = hdet.data_parallel(nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    names = {"model": model, "optimizer": optimizer, "total_steps": 450}
    for block in blocks("machines.md"):
        exec(block, names)
    ensemble, rank, met = names["ensemble"], hdet.find_replicas().rank, []
    for step in range(450):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * step + rank))
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step(loss)
        met += [] if ensemble.mid_round else [step + 1]
    return met, [p.tolist() for p in model.parameters()]


def test_the_code_about_machines_runs():
    first, second = run(follow_machines, 2)
    assert first == second
    assert first[0] == [200, 400, 450]
