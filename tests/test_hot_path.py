"""Ordinary steps issue no collective and read nothing back from the device.

The tensors live on the meta device: they have no values, so every read and every copy to the host fails.
"""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from processes import run
from torch import nn, optim

import hdet


class TensorRateSGD(optim.SGD):
    """SGD that uses a tensor learning rate on the device, as capturable optimizers do."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad)


def use_fake_group():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)


def count_collectives(calls):
    gathers = ("all_gather", "all_gather_into_tensor", "all_gather_single")
    for name in ("all_reduce", *gathers, "broadcast", "barrier", "new_group"):
        setattr(dist, name, lambda *a, _n=name, **k: calls.append(_n))


def ordinary_steps(kind, lr_is_tensor):
    use_fake_group()
    calls = []
    parameters = [nn.Parameter(torch.zeros(3, device="meta")) for _ in range(4)]
    o = (TensorRateSGD if lr_is_tensor else optim.SGD)([{"params": [p]} for p in parameters], lr=0.1, momentum=0.9)
    if kind == "drop-in":
        scheduler = hdet.OneCycleAutoLR(
            o, 0.1, total_steps=400, ensemble_lr_spread_ratio=0.3, model_sync_interval=400,
            enable_auto_lr=True, auto_lr_warmup_steps=100,
        )  # fmt: skip
        ensemble, advance = scheduler.ensemble, scheduler.step
    else:
        rates = hdet.learning_rate(o, spread=0.3, per_group=True)
        rates = [dataclasses.replace(rate, floor=1e-3) for rate in rates]
        ensemble = hdet.Ensemble(o, rates, interval=400, controller=hdet.controllers.Softmax())
        advance = ensemble.step
    if lr_is_tensor:
        for group in o.param_groups:
            group["lr"] = torch.zeros((), device="meta")
    ensemble.engine.run.steering.scale_by(0.5, list(ensemble.scales))  # as after a move of the controller
    count_collectives(calls)
    for step in range(120):
        for p in parameters:
            p.grad = torch.ones_like(p)
        o.step()
        advance(torch.zeros((), device="meta", dtype=torch.bfloat16 if step % 2 else torch.float32))
    assert calls == []
    assert ensemble.engine.run.rounds.at.step == 120
    assert len(ensemble.multipliers) == 4
    assert all(m in (0.7, 1.3) for m in ensemble.multipliers.values())


@pytest.mark.parametrize("kind", ["drop-in", "ensemble"])
def test_no_collective_and_no_host_read(kind):
    run(ordinary_steps, 1, kind, False, initialise=False)


def test_not_with_a_tensor_learning_rate_either():
    run(ordinary_steps, 1, "ensemble", True, initialise=False)


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.item(),
        lambda t: float(t),
        lambda t: bool(t),
        lambda t: t.tolist(),
        lambda t: t.numpy(),
        lambda t: t.cpu(),
        lambda t: torch.zeros(()).copy_(t),
    ],
)
def test_such_reads_fail(read):
    with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
        read(torch.zeros((), device="meta"))


def collectives_of_a_converge(parameters):
    calls = []
    real = {name: getattr(dist, name) for name in ("all_reduce", "all_gather")}
    for name, original in real.items():
        setattr(dist, name, lambda *a, _n=name, _f=original, **k: (calls.append(_n), _f(*a, **k))[1])
    weights = [nn.Parameter(torch.zeros(1000 // parameters)) for _ in range(parameters)]
    o = optim.AdamW(weights, lr=0.1)
    ensemble = hdet.Ensemble(o, [hdet.learning_rate(o, spread=0.3)], interval=2)
    for _ in range(4):
        for p in weights:
            p.grad = torch.ones_like(p)
        o.step()
        ensemble.step(1.0)
    return calls


def test_a_converge_takes_two_collectives_whatever_the_number_of_parameters():
    for parameters in (1, 10, 500):
        assert run(collectives_of_a_converge, 2, parameters) == [["all_gather", "all_reduce"] * 2] * 2
