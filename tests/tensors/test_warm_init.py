import math
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hdet


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 10))
    with torch.no_grad():
        model[1].weight.mul_(20)
    model[0].bias.requires_grad_(False)
    return model


def noise_of(per, seed, noise=0.01):
    torch.manual_seed(5)
    states = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
    model = DistributedDataParallel(make())
    hdet.warm_init(model, noise, per=per, seed=seed)
    torch.manual_seed(5)
    assert states[1:] == (np.random.get_state()[1].tolist(), random.getstate())
    return [(a - b).detach() for a, b in zip(model.parameters(), make().parameters(), strict=True)]


def rng_untouched():
    model = DistributedDataParallel(make())
    before = torch.get_rng_state()
    hdet.warm_init(model)
    return torch.equal(before, torch.get_rng_state())


def test_the_global_generator_is_left_alone():
    assert run(rng_untouched, 2) == [True, True]


@pytest.mark.parametrize("per", ["tensor", "model"])
def test_size_independence_and_reproducibility(per):
    first, again, other = (run(noise_of, 2, per, seed) for seed in (0, 0, 1))
    weights = list(make().parameters())
    total = math.sqrt(sum(p.norm().item() ** 2 for i, p in enumerate(weights) if i != 1))
    numel = sum(p.numel() for i, p in enumerate(weights) if i != 1)
    for index, p in enumerate(weights):
        a, b = first[0][index], first[1][index]
        if index == 1:  # frozen
            assert not a.any()
            continue
        expected = 0.01 * (p.norm().item() / math.sqrt(p.numel()) if per == "tensor" else total / math.sqrt(numel))
        assert a.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * p.numel()))
        correlation = (a * b).mean() / (a.std() * b.std())
        assert abs(correlation.item()) < 5 / math.sqrt(p.numel())
        assert torch.equal(a, again[0][index])
        assert torch.equal(b, again[1][index])
        assert not torch.equal(a, other[0][index])
    # averaged over N replicas, the noise has 1/sqrt(N) of its size
    mean = (first[0][0] + first[1][0]) / 2
    assert mean.std().item() == pytest.approx(first[0][0].std().item() / math.sqrt(2), rel=0.05)


def before_the_wrap():
    with pytest.raises(ValueError, match="must come after DistributedDataParallel") as caught:
        hdet.warm_init(make())
    hdet.warm_init(make(), unwrapped=True)
    hdet.warm_init(torch.compile(DistributedDataParallel(make())))
    return str(caught.value)


def test_before_the_wrap_is_a_clear_error():
    assert all("warm_init(model)" in text for text in run(before_the_wrap, 2))


def first_converge():
    model = DistributedDataParallel(make().double())
    hdet.warm_init(model)
    start = [p.detach().clone() for p in model.parameters()]
    o = torch.optim.SGD(model.parameters(), lr=0.0)
    ensemble = hdet.Ensemble(o, [hdet.learning_rate(o, spread=0.1)], interval=1)
    with ensemble.consensus():  # before the first step, too, the replicas differ
        middle = model.module[0].weight.detach().clone()
    model(torch.ones(1, 200, dtype=torch.float64)).sum().backward()
    o.step()
    ensemble.step()
    everyone = [torch.empty_like(start[0]) for _ in range(2)]
    dist.all_gather(everyone, start[0])
    torch.testing.assert_close(model.module[0].weight.detach(), (everyone[0] + everyone[1]) / 2)
    torch.testing.assert_close(middle, (everyone[0] + everyone[1]) / 2)


def test_the_first_converge_averages_the_noise():
    run(first_converge, 2)


def flat(index):
    return 0.0


def gathered(model):
    """The first weights of both replicas."""
    mine = model.module[0].weight.detach()
    everyone = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(everyone, mine)
    return everyone


def noisy_run(options, steps=4, spread=0.0):
    """The weights of both replicas before the first step and after each one, and what each step sent."""
    model = DistributedDataParallel(make().double())
    o = torch.optim.SGD(model.parameters(), lr=1e-12, momentum=0.9, weight_decay=0.1)
    rates = [hdet.learning_rate(o, spread=spread)]
    ensemble = hdet.Ensemble(o, rates, interval=2, total_steps=steps, model=model, **options)
    hdet.warm_init(model)  # before or after the ensemble is made, but before its first step
    seen = [gathered(model)]
    for _ in range(steps):
        model(torch.ones(1, 200, dtype=torch.float64)).sum().backward()
        o.step()
        o.zero_grad()
        ensemble.step(torch.tensor(1.0))
        seen.append(gathered(model))
    return [(a, b) for a, b in seen], ensemble.progress


@pytest.mark.parametrize(
    ("options", "spread"),
    [({}, 0.0), ({"controller": hdet.Auto(finds=False), "probe": flat}, 0.1),
     ({"averaging": hdet.Averaging(outer_step=0.5)}, 0.0), ({"averaging": hdet.Averaging(outer_step=0.5)}, 0.1),
     ({"averaging": hdet.Averaging(outer_step=hdet.Nesterov())}, 0.1)],
)  # fmt: skip
def test_the_first_round_ends_in_an_average_whatever_is_explored(options, spread):
    for seen, progress in run(noisy_run, 2, options, 4, spread):
        different = [not torch.equal(a, b) for a, b in seen]
        assert different[:3] == [True, True, False]  # at the start, within the first round, at its end
        assert not different[4]
        mean = (seen[0][0] + seen[0][1]) / 2
        torch.testing.assert_close(seen[2][0], mean)
        assert progress["round"] == 2
        assert not progress["noisy"]


def noisy_resume(folder):
    def parts():
        torch.manual_seed(0)
        model = DistributedDataParallel(make())
        o = torch.optim.SGD(model.module[1].parameters(), lr=1e-3)  # the noise is in all of them
        ensemble = hdet.Ensemble(o, [hdet.learning_rate(o, spread=0.0)], interval=3, total_steps=4, model=model)
        return model, o, {"model": model, "optimizer": o, "ensemble": ensemble}

    def step(model, o, run):
        model(torch.ones(1, 200)).sum().backward()
        o.step()
        o.zero_grad()
        run["ensemble"].step()

    model, o, first = parts()
    hdet.warm_init(model)
    step(model, o, first)
    assert first["ensemble"].mid_round
    hdet.save(folder, first)
    again, o2, second = parts()
    hdet.load(folder, second)
    for _ in range(3):
        step(model, o, first)
        step(again, o2, second)
    return [p.detach() for p in model.parameters()], [p.detach() for p in again.parameters()]


def test_a_noisy_first_round_is_resumed(tmp_path):
    (first, again), (other, _) = run(noisy_resume, 2, tmp_path)
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def noisy_in_another_order(order):
    """Noise that meets an ensemble in other ways: whether the replicas are equal after each of four steps."""
    model = DistributedDataParallel(make(), find_unused_parameters=True)
    trained = model.module[1].parameters() if order == "a part is trained" else model.parameters()
    o = torch.optim.SGD(trained, lr=1e-3)
    ensemble = hdet.Ensemble(o, [hdet.learning_rate(o, spread=0.0)], interval=2, total_steps=4, model=model)
    if order == "evaluated before":
        with ensemble.consensus():
            pass
    hdet.warm_init(model)
    if order == "frozen after":
        model.module[0].weight.requires_grad_(False)
    equal = []
    for _ in range(4):
        model(torch.ones(1, 200)).sum().backward()
        o.step()
        o.zero_grad()
        ensemble.step()
        equal.append(torch.equal(*gathered(model)))
    return equal


@pytest.mark.parametrize("order", ["evaluated before", "frozen after", "a part is trained"])
def test_noise_is_averaged_in_whatever_way_it_comes(order):
    assert run(noisy_in_another_order, 2, order) == [[False, True, True, True]] * 2


def noisy_and_resumed(folder, steps, outer_step):
    """A script that calls warm_init in any case and then loads, if there is something to load."""

    def parts():
        model = DistributedDataParallel(make())
        o = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        ensemble = hdet.Ensemble(
            o,
            [hdet.learning_rate(o, spread=0.1)],
            interval=2,
            total_steps=8,
            model=model,
            averaging=hdet.Averaging(outer_step=outer_step),
        )
        hdet.warm_init(model)
        return model, o, {"model": model, "optimizer": o, "ensemble": ensemble}

    def step(model, o, entries):
        model(torch.ones(1, 200)).sum().backward()
        o.step()
        o.zero_grad()
        entries["ensemble"].step()

    model, o, first = parts()
    for _ in range(steps):
        step(model, o, first)
    hdet.save(folder, first)
    again, o2, second = parts()
    hdet.load(folder, second)
    for _ in range(8 - steps):
        step(model, o, first)
        step(again, o2, second)
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
@pytest.mark.parametrize("outer_step", [1.0, 0.5])
def test_a_script_that_adds_noise_and_then_loads_goes_on_exactly(tmp_path, steps, outer_step):
    assert run(noisy_and_resumed, 2, tmp_path, steps, outer_step) == [True, True]


def anothers_noise():
    model = DistributedDataParallel(make())
    o = torch.optim.SGD(model.parameters(), lr=1e-3)
    ensemble = hdet.Ensemble(o, [hdet.learning_rate(o, spread=0.0)], interval=2, total_steps=8, model=model)
    hdet.warm_init(model)
    model(torch.ones(1, 200)).sum().backward()
    o.step()
    ensemble.step()
    saved = ensemble.state_dict()
    saved["mid_round"] = {**saved["mid_round"], "replica": 1 - saved["mid_round"]["replica"]}
    with pytest.raises(ValueError, match="replica"):
        ensemble.load_state_dict(saved)
    averaged = ensemble.averaged_state(saved)
    ensemble.load_state_dict(averaged)
    return ensemble.progress["noisy"]


def test_a_noisy_state_of_another_replica_is_refused_and_averaged_ones_are_not_noisy():
    assert run(anothers_noise, 2) == [False, False]


def sharded_and_trained(outer_step):
    """The way out for sharded replicas: noise, then fully_shard, then an ensemble on the mesh."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = make()
    hdet.warm_init(model, replicas=mesh["replicate"].get_group(), unwrapped=True)
    torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    o = torch.optim.SGD(model.parameters(), lr=1e-3)
    ensemble = hdet.Ensemble(
        o, [hdet.learning_rate(o, spread=0.0)], interval=2, total_steps=6, model=model, replicas=mesh,
        averaging=hdet.Averaging(outer_step=outer_step),
    )  # fmt: skip
    equal = []
    for _ in range(6):
        model(torch.ones(1, 200)).sum().backward()
        o.step()
        o.zero_grad()
        ensemble.step()
        mine = model[0].weight.to_local().detach()
        everyone = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(everyone, mine.contiguous())
        equal.append(torch.equal(*everyone))
    return equal


@pytest.mark.parametrize("outer_step", [1.0, 0.5])
def test_noise_of_sharded_replicas_is_averaged(outer_step):
    assert run(sharded_and_trained, 2, outer_step) == [[False, True, True, True, True, True]] * 2


def sharded():
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model, same = make(), make()
    hdet.warm_init(model, replicas=mesh)
    hdet.warm_init(same, replicas=mesh["replicate"].get_group(), unwrapped=True)
    noisy = model[0].weight.detach().clone()
    assert torch.equal(noisy, same[0].weight)
    torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    assert torch.equal(model[0].weight.full_tensor(), noisy)
    with pytest.raises(ValueError, match="before fully_shard") as caught:
        hdet.warm_init(model, unwrapped=True)
    return str(caught.value), noisy


def test_sharded_parameters_are_refused_and_the_way_out_works():
    (text, noisy), (again, other) = run(sharded, 2)
    assert text == again
    assert not torch.equal(noisy, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_other_dtypes(dtype):
    model = nn.ParameterList([nn.Parameter(torch.ones(4000, dtype=dtype))])
    hdet.warm_init(model, 0.1)
    assert model[0].dtype == dtype
    assert (model[0].detach().to(torch.complex128) - 1).std().item() == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, "much"])
def test_bad_noise(bad):
    with pytest.raises(ValueError, match="noise must"):
        hdet.warm_init(nn.Linear(1, 1), bad)
    with pytest.raises(ValueError, match="per must"):
        hdet.warm_init(nn.Linear(1, 1), per="layer")
