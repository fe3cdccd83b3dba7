"""FSDP2 within replicas: 2 x 2 ranks against one process in float64, and what is refused."""

import math

import pytest
import torch
import torch.distributed as dist
from processes import run
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hdet

STEPS, INTERVAL, SPREAD = 7, 4, 0.4  # a round, its converge, and three more steps


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def batch(step, rank):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def loss_of(model, x):
    return (model(x) - x.sum(1, keepdim=True).sin()).square().mean()


def make_mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def shard(model, mesh):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def start(gradients, **options):
    mesh = make_mesh()
    model = shard(network(), mesh if gradients == "shared" else mesh["shard"])
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    schedule = optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, STEPS)
    ensemble = hdet.Ensemble(
        optimizer, [hdet.learning_rate(optimizer, spread=SPREAD)], interval=INTERVAL, model=model, mesh=mesh,
        gradients=gradients, **options,
    )  # fmt: skip
    return model, optimizer, schedule, ensemble


def train(parts, steps):
    model, optimizer, schedule, ensemble = parts
    losses = []
    for step in steps:
        loss = loss_of(model, batch(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        ensemble.step(loss)
        losses.append(loss.item())
    return losses


def weights(model):
    return [whole(p).detach().tolist() for p in model.parameters()]


def sharded_run(gradients):
    records = []
    options = {"on_round": [records.append]}
    if gradients == "shared":
        options["controller"] = hdet.Softmax(temperature=0.1)
    parts = start(gradients, **options)
    losses = train(parts, range(STEPS))
    model, _, _, ensemble = parts
    mid = weights(model)
    with ensemble.consensus():
        consensus = weights(model)
    assert weights(model) == mid
    seen = (ensemble.multipliers["learning_rate"], ensemble.scales["learning_rate"], list(records[0].scores))
    ensemble.finish()
    ensemble.close()
    return losses, mid, consensus, weights(model), seen


def reference(gradients, deals, scales):
    """The same in one process: replicas are copies, the ranks of one share its gradient."""
    replicas = [network() for _ in range(2)]
    optimizers = [optim.AdamW(r.parameters(), lr=1e-2) for r in replicas]
    schedules = [optim.lr_scheduler.LinearLR(o, 1.0, 0.5, STEPS) for o in optimizers]
    losses = [[], [], [], []]
    for step in range(STEPS):
        everyone = []
        for number, replica in enumerate(replicas):
            own = [loss_of(replica, batch(step, 2 * number + part)) for part in range(2)]
            for part in range(2):
                losses[2 * number + part].append(own[part].item())
            (sum(own) / 2).backward()
            everyone.append([p.grad for p in replica.parameters()])
        if gradients == "shared":
            for left, right in zip(*everyone, strict=True):
                mean = (left + right) / 2
                left.copy_(mean)
                right.copy_(mean)
        deal = deals[step // INTERVAL]
        for number, (optimizer, schedule) in enumerate(zip(optimizers, schedules, strict=True)):
            group = optimizer.param_groups[0]
            base = group["lr"]
            group["lr"] = base * scales[step // INTERVAL] * deal[number]
            optimizer.step()
            group["lr"] = base
            optimizer.zero_grad()
            schedule.step()
        if step == INTERVAL - 1:
            average(replicas, optimizers, state=gradients == "local")
    mid = [[p.detach().clone() for p in r.parameters()] for r in replicas]
    average(replicas, optimizers, state=False)
    return losses, mid, [p.detach() for p in replicas[0].parameters()]


@torch.no_grad()
def average(replicas, optimizers, state):
    for left, right in zip(*(r.parameters() for r in replicas), strict=True):
        pairs = [(left, right)]
        if state:
            a, b = optimizers[0].state[left], optimizers[1].state[right]
            pairs += [(a[key], b[key]) for key in ("exp_avg", "exp_avg_sq")]
        for x, y in pairs:
            mean = (x + y) / 2
            x.copy_(mean)
            y.copy_(mean)


def close_to(ours, expected):
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(torch.tensor(a, dtype=torch.float64), b, rtol=0, atol=1e-6)
    return True


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_two_replicas_of_two_ranks_are_as_in_one_process(gradients):
    results = run(sharded_run, 4, gradients)
    seen = [result[4] for result in results]
    assert seen[0] == seen[1]  # the ranks of a replica have its slot, its scales and its scores
    assert seen[2] == seen[3]
    assert seen[0][1:] == seen[2][1:]
    deals = [dealt(0), dealt(1)]
    assert (seen[0][0], seen[2][0]) == deals[1]
    losses, mid, last = reference(gradients, deals, [1.0, seen[0][1]])
    if gradients == "shared":
        assert seen[0][1] != 1.0  # the controller has moved it, by scores of replicas and not of ranks
    assert seen[0][2] == pytest.approx([sum(losses[2 * r][:4] + losses[2 * r + 1][:4]) / 8 for r in range(2)])
    for rank, (ours, at_mid, consensus, final, _) in enumerate(results):
        assert ours == pytest.approx(losses[rank], abs=1e-6)
        assert close_to(at_mid, mid[rank // 2])
        assert close_to(consensus, last)
        assert close_to(final, last)
    assert any(
        not math.isclose(a, b, abs_tol=1e-5)
        for a, b in zip(*(torch.tensor(results[r][1][0]).flatten() for r in (0, 2)), strict=True)
    )


def dealt(number):
    def see():
        o = optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        ensemble = hdet.Ensemble(o, [hdet.learning_rate(o, spread=SPREAD)], interval=1)
        ensemble.start_from(number)
        return ensemble.multipliers["learning_rate"]

    return tuple(hdet.in_process(see, 2))
