"""Learning rate, weight decay and momentum in the parameter groups of real optimizers."""

import warnings

import pytest
import torch
from torch import nn, optim

import hdet
from hdet._explore.fan_out import FanOut


def make(kind=optim.AdamW, groups=2, **options):
    layers = [nn.Linear(2, 2, bias=False) for _ in range(groups)]
    made = kind([{"params": layer.parameters()} for layer in layers], lr=0.1, **options)
    for p in (p for layer in layers for p in layer.parameters()):
        p.grad = torch.ones_like(p)
    return made


def stepped(optimizer, hyperparameters, factors):
    """What the groups held during one step, and after it."""
    fan_out = FanOut([optimizer], hyperparameters)
    fan_out.go_on()
    fan_out.set({h.name: 1.0 for h in hyperparameters}, factors)
    seen = []
    optimizer.register_step_pre_hook(lambda o, a, k: seen.append([dict(g) for g in o.param_groups]))
    before = [dict(g) for g in optimizer.param_groups]
    optimizer.step()
    after = [dict(g) for g in optimizer.param_groups]
    assert before == after
    fan_out.close()
    return seen[0]


def test_weight_decay_is_one_scale_on_all_groups_and_zero_stays_zero():
    optimizer = make(weight_decay=0.1)
    optimizer.param_groups[1]["weight_decay"] = 0.0
    decay = hdet.weight_decay(optimizer)
    assert decay.regulariser
    during = stepped(optimizer, [decay], {"weight_decay": 1.5})
    assert [g["weight_decay"] for g in during] == [pytest.approx(0.15), 0.0]


def test_bounds_do_not_turn_on_the_decay_of_a_group_without():
    optimizer = make(weight_decay=0.1)
    optimizer.param_groups[1]["weight_decay"] = 0.0
    decay = hdet.weight_decay(optimizer, bounds=(0.05, 0.12))
    for multiplier, first in ((0.1, 0.05), (1.0, 0.1), (1.5, 0.12)):
        during = stepped(optimizer, [decay], {"weight_decay": multiplier})
        assert [g["weight_decay"] for g in during] == [first, 0.0]
    assert decay.value_of(torch.tensor(0.0), 2.0, 1.5) == 0
    assert decay.value_of(torch.tensor(0.1), 2.0, 1.5) == torch.tensor(0.12)
    with pytest.raises(ValueError, match=r"weight_decay is 0\.1, outside its bounds"):
        hdet.weight_decay(optimizer, bounds=(0.2, 1.0))


def test_weight_decay_per_group():
    made = hdet.weight_decay(make(weight_decay=0.1), per_group=True)
    assert [h.name for h in made] == ["weight_decay/0", "weight_decay/1"]


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW, optim.NAdam])
def test_both_betas_at_once(kind):
    optimizer = make(kind, groups=1)
    betas = [hdet.momentum(optimizer), hdet.momentum(optimizer, beta=2)]
    assert [h.name for h in betas] == ["beta1", "beta2"]
    (during,) = stepped(optimizer, betas, {"beta1": 0.5, "beta2": 2.0})
    assert during["betas"] == (pytest.approx(4.5 / 5.5), pytest.approx(1998 / 1999))
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_momentum_of_sgd_stays_below_one():
    optimizer = make(optim.SGD, groups=1, momentum=0.9)
    (during,) = stepped(optimizer, [hdet.momentum(optimizer)], {"momentum": 1e6})
    assert 0.999 < during["momentum"] < 1.0


def test_bounds_of_a_momentum():
    optimizer = make(optim.SGD, groups=1, momentum=0.9)
    momentum = hdet.momentum(optimizer, bounds=(0.5, 0.95))
    for multiplier, value in ((1e-9, 0.5), (1e9, 0.95), (2.0, 0.5 + 0.45 * 16 / 17)):
        (during,) = stepped(optimizer, [momentum], {"momentum": multiplier})
        assert during["momentum"] == pytest.approx(value)
    for bounds in ((0.5, 1.5), (0.5,), None):
        with pytest.raises(ValueError, match="must lie within"):
            hdet.momentum(optimizer, bounds=bounds)


def test_bounds_do_not_turn_on_the_momentum_of_a_group_without():
    optimizer = make(optim.SGD, momentum=0.9)
    optimizer.param_groups[1]["momentum"] = 0.0
    momentum = hdet.momentum(optimizer, bounds=(0.5, 0.95))
    first, second = stepped(optimizer, [momentum], {"momentum": 2.0})
    assert first["momentum"] > 0.9
    assert second["momentum"] == 0.0
    assert momentum.value_of(torch.tensor(0.0), 2.0, 2.0) == 0
    assert 0.9 < momentum.value_of(torch.tensor(0.9), 2.0, 2.0) < 0.95


@pytest.mark.parametrize("explore", [hdet.weight_decay, hdet.momentum])
def test_what_is_off_in_every_group_is_told(explore):
    optimizer = make(optim.SGD)
    probe = hdet.Probe(torch.ones(4), lambda model, x: x.mean(), held_out=True)
    model = nn.ParameterList(p for group in optimizer.param_groups for p in group["params"])
    options = {"total_steps": 9, "controller": hdet.controllers.Slope(), "probe": probe, "model": model}
    for per_group in (False, True):
        with pytest.warns(UserWarning, match="is off or at its bound now in every parameter group"):
            hdet.Ensemble(optimizer, [explore(optimizer, per_group=per_group)], **options).close()
    for group in optimizer.param_groups[:1]:
        group.update(weight_decay=0.1, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hdet.Ensemble(optimizer, [explore(optimizer, per_group=True)], **options).close()


def test_an_optimizer_without_it_is_refused():
    with pytest.raises(ValueError, match="Adagrad has no momentum"):
        hdet.momentum(make(optim.Adagrad))
    with pytest.raises(ValueError, match="SGD has no beta2"):
        hdet.momentum(make(optim.SGD, momentum=0.9), beta=2)
    with pytest.raises(ValueError, match="has no 'weight_decay'"):
        hdet.weight_decay(optim.SparseAdam(nn.Embedding(3, 2).parameters()))


def test_bounds_of_the_learning_rate_hold_during_the_step():
    optimizer = make(groups=1)
    rate = hdet.learning_rate(optimizer, spread=0.5, bounds=(1e-4, 0.12))
    (during,) = stepped(optimizer, [rate], {"learning_rate": 1.5})
    assert during["lr"] == 0.12


def test_the_same_beta_twice_is_refused():
    optimizer = make()
    with pytest.raises(ValueError, match="named 'beta1'"):
        hdet.Ensemble(optimizer, [hdet.momentum(optimizer), hdet.momentum(optimizer)], total_steps=9)
    both = [hdet.momentum(optimizer), *hdet.momentum(optimizer, per_group=True)]
    with pytest.raises(ValueError, match="both explore"):
        hdet.Ensemble(optimizer, both, total_steps=9)


def test_state_saved_within_a_step_holds_the_betas_of_the_schedule():
    optimizer = make(optim.Adam, groups=1)
    betas = [hdet.momentum(optimizer), hdet.momentum(optimizer, beta=2)]
    fan_out = FanOut([optimizer], betas)
    fan_out.go_on()
    fan_out.set({"beta1": 1.0, "beta2": 1.0}, {"beta1": 0.5, "beta2": 2.0})
    saved = []
    optimizer.register_step_pre_hook(lambda o, a, k: saved.append(o.state_dict()["param_groups"][0]["betas"]))
    optimizer.step()
    assert saved == [(0.9, 0.999)]
