"""The outer step: a part of the way, in place, with and without fan-out."""

import copy

import pytest
import torch
from processes import run
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import hdet


def model_and_optimizer(seed=0):
    torch.manual_seed(seed)
    model = nn.Linear(3, 1)
    return model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, optimizer, ensemble, steps, first=0, after=None):
    for step in range(first, first + steps):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if ensemble is not None:
            ensemble.step(loss)
        if after is not None:
            after(step + 1)
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def test_half_a_round_is_taken_and_the_last_one_whole():
    model, optimizer = model_and_optimizer()
    twin, twin_optimizer = model_and_optimizer()
    ensemble = hdet.Ensemble(
        optimizer,
        [hdet.learning_rate(optimizer, spread=0.0)],
        total_steps=12,
        interval=5,
        averaging=hdet.Averaging(outer_step=0.5),
    )
    found = train(model, optimizer, ensemble, 12)
    for length, first in ((5, 0), (5, 5), (2, 10)):
        start = nn.utils.parameters_to_vector(twin.parameters()).detach().clone()
        end = train(twin, twin_optimizer, None, length, first)
        if first < 10:
            nn.utils.vector_to_parameters(start + 0.5 * (end - start), twin.parameters())
    torch.testing.assert_close(found, nn.utils.parameters_to_vector(twin.parameters()).detach(), rtol=1e-6, atol=1e-7)


def test_an_outer_step_of_one_is_plain_training():
    model, optimizer = model_and_optimizer()
    twin, twin_optimizer = model_and_optimizer()
    rates = [hdet.learning_rate(optimizer, spread=0.0)]
    ensemble = hdet.Ensemble(optimizer, rates, total_steps=12, interval=5, averaging=hdet.Averaging(outer_step=1.0))
    assert torch.equal(train(model, optimizer, ensemble, 12), train(twin, twin_optimizer, None, 12))


@pytest.mark.parametrize("amount", [0.0, -1.0, 1.5, float("nan")])
def test_what_is_no_part_of_a_step_is_refused(amount):
    _, optimizer = model_and_optimizer()
    with pytest.raises(ValueError, match="outer_step must lie in"):
        hdet.Ensemble(optimizer, total_steps=10, averaging=hdet.Averaging(outer_step=amount))


@pytest.mark.parametrize("stop", [3, 5, 7])
def test_resume_equals_uninterrupted(stop):
    def make():
        model, optimizer = model_and_optimizer()
        rates = [hdet.learning_rate(optimizer, spread=0.0)]
        return (
            model,
            optimizer,
            hdet.Ensemble(optimizer, rates, total_steps=12, interval=5, averaging=hdet.Averaging(outer_step=0.5)),
        )

    whole = train(*make(), 12)
    model, optimizer, ensemble = make()
    train(model, optimizer, ensemble, stop)
    saved = model.state_dict(), optimizer.state_dict(), ensemble.state_dict()
    model, optimizer, ensemble = make()
    ensemble.load_state_dict(saved[2])
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert torch.equal(train(model, optimizer, ensemble, 12 - stop, stop), whole)


def _with_and_without_fan_out():
    """What is sent in 18 steps of DDP alone, with an outer step, and with an outer step and fan-out; the weights."""
    from torch.profiler import profile

    sent = {}
    for spread in (None, 0.0, 0.3):
        model, optimizer = model_and_optimizer()
        model = DistributedDataParallel(model)
        ensemble = None
        if spread is not None:
            rates = [hdet.learning_rate(optimizer, spread=spread)]
            ensemble = hdet.Ensemble(
                optimizer, rates, total_steps=20, interval=5, averaging=hdet.Averaging(outer_step=0.5), model=model
            )
        train(model, optimizer, ensemble, 2)
        with profile() as profiled:
            end = train(model, optimizer, ensemble, 18, 2)
        traffic = {e.key: e.count for e in profiled.key_averages() if "c10d::" in e.key or "gloo" in e.key}
        sent[spread] = traffic, end
        if ensemble is not None:
            ensemble.close()
    return sent


def test_without_fan_out_it_sends_nothing_and_replicas_end_equal():
    found = run(_with_and_without_fan_out, 2)
    for spread in (None, 0.0, 0.3):
        assert torch.equal(found[0][spread][1], found[1][spread][1])
    assert sum(found[0][None][0].values()) >= 18  # DDP's own
    assert found[0][0.0][0] == found[0][None][0]
    assert sum(found[0][0.3][0].values()) > sum(found[0][None][0].values())


def test_the_drop_in_takes_it_too():
    model, optimizer = model_and_optimizer()
    scheduler = hdet.OneCycleAutoLR(
        optimizer, 0.1, total_steps=10, model_sync_interval=5, ensemble={"averaging": hdet.Averaging(outer_step=0.5)}
    )
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    for step in range(5):
        (model(torch.ones(1, 3)) - 1).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 4:
            whole = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        scheduler.step()
    after = nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(after, (before + whole) / 2)


def test_after_the_last_step_training_is_plain():
    model, optimizer = model_and_optimizer()
    rates = [hdet.learning_rate(optimizer, spread=0.0)]
    ensemble = hdet.Ensemble(optimizer, rates, total_steps=10, interval=5, averaging=hdet.Averaging(outer_step=0.5))
    train(model, optimizer, ensemble, 10)
    twin, twin_optimizer = model_and_optimizer()
    twin.load_state_dict(model.state_dict())
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(train(model, optimizer, ensemble, 7, 10), train(twin, twin_optimizer, None, 7, 10))


def finished(total_steps):
    torch.manual_seed(0)
    model = hdet.data_parallel(nn.Linear(3, 1))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    rates = [hdet.learning_rate(optimizer, spread=0.3)]
    ensemble = hdet.Ensemble(
        optimizer, rates, total_steps=total_steps, interval=5, averaging=hdet.Averaging(outer_step=0.5), model=model
    )
    train(model, optimizer, ensemble, 8)
    ensemble.finish()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_finish_takes_the_last_round_whole():
    assert torch.equal(hdet.in_process(finished, 2, None)[0], hdet.in_process(finished, 2, 8)[0])


def skips_a_round():
    """Local gradients, and one replica whose GradScaler skips every step of a round: all must end equal."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    rates = [hdet.learning_rate(optimizer, spread=0.0)]
    ensemble = hdet.Ensemble(
        optimizer,
        rates,
        total_steps=9,
        interval=3,
        averaging=hdet.Averaging(outer_step=0.5),
        gradients="local",
        model=model,
    )
    for step in range(9):
        loss = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        if not (ensemble.replicas.rank == 1 and 3 <= step < 6):
            optimizer.step()
        optimizer.zero_grad()
        ensemble.step(loss, attempted=True)
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_a_replica_that_skips_a_whole_round_steps_back_too():
    first, second = hdet.in_process(skips_a_round, 2)
    assert torch.equal(first, second)


def test_an_outer_step_that_is_never_taken_warns():
    _, optimizer = model_and_optimizer()
    with pytest.warns(UserWarning, match=r"outer_step=0\.5 has no effect"):
        hdet.OneCycleAutoLR(optimizer, 0.1, total_steps=10, ensemble={"averaging": hdet.Averaging(outer_step=0.5)})
