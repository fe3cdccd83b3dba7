"""The code of docs/controllers.md and docs/safety.md runs as it is.

The controller of the first one goes through the table in test_controllers.py too.
"""

import pathlib
import re

import torch
from processes import run
from torch import nn

import hdet

DOCS = pathlib.Path(__file__).parent.parent / "docs"


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), flags=re.S)


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
    return names["ensemble"]._rounds.at.step, [p.tolist() for p in model.parameters()]


def test_the_code_about_safety_runs():
    first, second = run(follow_safety, 2)
    assert first == second
    assert first[0] == 23
