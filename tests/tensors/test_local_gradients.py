"""Replicas that train on their own between converges: no traffic, everything averaged, signals that exist."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from cases import Net, all_equal, batch, flat
from processes import run
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet._tensors.local_gradients import LocalGradients


def make(wrapped, interval=4, spread=0.0, hyperparameters=None, **options):
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net) if wrapped else net
    o = optim.AdamW(model.parameters(), lr=0.01)
    explored = hyperparameters(o, model) if hyperparameters else [hdet.learning_rate(o, spread=spread)]
    return model, o, hdet.Ensemble(o, explored, interval=interval, gradients="local", model=model, **options)


def step(model, o, ensemble, number, data_rank=None):
    x, y = batch(dist.get_rank() if data_rank is None else data_rank, number)
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    o.step()
    o.zero_grad()
    if ensemble is not None:
        ensemble.step(loss)


def on_their_own(wrapped):
    """A round of local training is each replica's plain training, then the mean of weights, state and buffers."""
    model, o, ensemble = make(wrapped)
    torch.manual_seed(0)
    twin = Net()
    twin_o = optim.AdamW(twin.parameters(), lr=0.01)
    for number in range(3):
        step(model, o, ensemble, number)
        step(twin, twin_o, None, number)
    assert torch.equal(flat(model.parameters()), flat(twin.parameters()))
    assert torch.equal(flat(b.float() for b in model.buffers()), flat(b.float() for b in twin.buffers()))
    assert not all_equal(model.parameters())
    step(twin, twin_o, None, 3)
    moments = flat(twin_o.state[p]["exp_avg"] for p in twin.parameters() if p in twin_o.state)
    expected = [flat(twin.parameters()), moments]
    for tensor in expected:
        dist.all_reduce(tensor)
        tensor.div_(dist.get_world_size())
    step(model, o, ensemble, 3)
    assert all_equal(model.parameters())
    assert all_equal(b for b in model.buffers() if b.is_floating_point())
    torch.testing.assert_close(flat(model.parameters()), expected[0], rtol=1e-6, atol=1e-7)
    found = flat(o.state[p]["exp_avg"] for p in model.parameters() if p in o.state)
    torch.testing.assert_close(found, expected[1], rtol=1e-5, atol=1e-8)
    ensemble.close()


@pytest.mark.parametrize("wrapped", [True, False])
def test_replicas_train_on_their_own_and_are_averaged(wrapped):
    run(on_their_own, 2, wrapped)


def around(how):
    """A wrapper around the module that the ensemble was given goes on sharing the gradients: it is told."""
    model = DistributedDataParallel(Net())
    o = optim.SGD(model.parameters(), lr=0.01)
    given = model if how == "the wrapper" else model.module
    trained = model.module if how == "bare" else model
    ensemble = hdet.Ensemble(o, [hdet.learning_rate(o, spread=0.1)], interval=2, gradients="local", model=given)

    def closure(number):
        o.zero_grad()
        x, y = batch(dist.get_rank(), number)
        loss = ((trained(x) - y) ** 2).mean()
        loss.backward()
        return loss

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(6):
            if how == "closures":
                ensemble.step(o.step(lambda number=number: closure(number)))
                continue
            loss = closure(number)
            o.step()
            ensemble.step(loss)
    ensemble.close()
    return [(str(w.message), w.filename) for w in caught if "pass the wrapper" in str(w.message)]


@pytest.mark.parametrize("how", ["inner", "closures"])
def test_a_wrapper_around_the_model_is_told(how):
    for said in run(around, 2, how):
        ((message, where),) = said
        assert "were the same on all replicas" in message
        assert where == __file__


@pytest.mark.parametrize("how", ["the wrapper", "bare"])
def test_gradients_that_are_local_are_not(how):
    assert run(around, 2, how) == [[], []]


def test_gradients_that_are_not_finite_say_nothing():
    p = nn.Parameter(torch.ones(2))
    switch = LocalGradients(nn.ParameterList([p]))
    for gradient in (math.inf, math.nan, 0.0):
        p.grad = torch.full((2,), gradient)
        switch.note([p])
        switch.read(2 * switch.told(torch.device("cpu")).tolist())
    p.grad = torch.ones(2)
    switch.note([p])
    with pytest.warns(UserWarning, match="pass the wrapper"):
        switch.read(2 * switch.told(torch.device("cpu")).tolist())
    assert switch.told(torch.device("cpu")).isnan()  # it is told once


@pytest.mark.parametrize("kind", ["complex", "sparse", "half", "double"])
def test_gradients_of_any_kind_are_added_up(kind):
    p = nn.Parameter(torch.ones(4, 2, dtype={"complex": torch.complex64, "half": torch.bfloat16}.get(kind)))
    p.grad = torch.full_like(p.data, 2.0)
    if kind == "complex":
        p.grad += 1j
    if kind == "sparse":
        p.grad = torch.sparse_coo_tensor(torch.tensor([[0, 0, 3]]), torch.ones(3, 2), (4, 2))
    if kind == "double":
        p = nn.Parameter(p.double())
        p.grad = torch.full_like(p.data, 1e300)
    switch = LocalGradients(nn.ParameterList([p]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        switch.note([p])
    expected = {"complex": 24.0, "sparse": 6.0, "half": 16.0, "double": 8e300}[kind]
    assert switch.told(torch.device("cpu")).tolist() == [pytest.approx(expected)]


def traffic():
    from torch.profiler import profile

    model, o, ensemble = make(True, interval=100)
    for number in range(2):
        step(model, o, ensemble, number)
    with profile() as profiled:
        for number in range(2, 12):
            step(model, o, ensemble, number)
        with model.no_sync():  # as users who accumulate do: it must not turn the sharing on again
            step(model, o, ensemble, 12)
        step(model, o, ensemble, 13)
    names = {event.key for event in profiled.key_averages()}
    assert not [n for n in names if "allreduce" in n or "broadcast" in n or "allgather" in n], names
    ensemble.finish()
    assert all_equal(model.parameters())
    for number in range(3):  # after the run it is plain DDP again
        step(model, o, ensemble, number)
    assert all_equal(model.parameters())
    ensemble.close()


def test_a_round_sends_nothing_and_sharing_comes_back_at_the_end():
    run(traffic, 2)


def with_a_scaler():
    """Steps that a GradScaler skips on one replica are counted where they are said to be attempted."""
    model, o, ensemble = make(False, interval=4)
    rounds = []
    for number in range(8):
        x, y = batch(dist.get_rank(), number)
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        if not (number == 1 and dist.get_rank() == 1):
            o.step()
        o.zero_grad()
        ensemble.step(loss, attempted=True)
        rounds.append(ensemble.engine.run.rounds.at.round)
    assert rounds == [0, 0, 0, 1, 1, 1, 1, 2]
    assert all_equal(model.parameters())
    ensemble.close()


def test_skipped_steps_count_when_attempted():
    run(with_a_scaler, 2)


def resume_in_mid_round():
    whole = make(False, spread=0.3)
    for number in range(10):
        step(*whole, number)
    model, o, ensemble = make(False, spread=0.3)
    for number in range(6):
        step(model, o, ensemble, number)
    saved = model.state_dict(), o.state_dict(), ensemble.state_dict()
    assert saved[2]["mid_round"]["replica"] == dist.get_rank()
    model, o, ensemble = make(False, spread=0.3)
    model.load_state_dict(saved[0])
    o.load_state_dict(saved[1])
    ensemble.load_state_dict(saved[2])
    for number in range(6, 10):
        step(model, o, ensemble, number)
    assert torch.equal(flat(model.parameters()), flat(whole[0].parameters()))


def test_resume_equals_uninterrupted():
    run(resume_in_mid_round, 2)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 1))
        self.register_buffer("temperature", torch.tensor(1.0))

    def forward(self, x):
        return self.net(x) / self.temperature


def forward_values():
    torch.manual_seed(0)
    model = DistributedDataParallel(Dropping())
    o = optim.SGD(model.parameters(), lr=0.01)
    smoothing = hdet.scalar("smoothing", 0.1, bounds=(0, 0.5), spread=0.5)
    explored = [
        hdet.dropout(model, spread=0.4),
        hdet.attribute(model.module, "temperature", spread=0.3),
        smoothing,
    ]
    records = []
    ensemble = hdet.Ensemble(
        o, explored, interval=2, gradients="local", model=model, on_round=[records.append], total_steps=8,
        controller=hdet.controllers.Slope(), probe=lambda index: 1.0 + 0.1 * dist.get_rank(),
    )  # fmt: skip
    for _ in range(3):
        model(torch.randn(3, 4)).sum().backward()
        o.step()
        ensemble.step(torch.tensor(1.0))
    own = [model.module.net[2].p, model.module.temperature.item(), smoothing.value]
    expected = [
        h.value_of(base, ensemble.scales[h.name], ensemble.multipliers[h.name])
        for h, base in zip(explored, (0.5, 1.0, 0.1), strict=True)
    ]
    assert own == pytest.approx(expected, rel=1e-6)
    assert any(scale != 1.0 for scale in ensemble.scales.values())
    with ensemble.consensus():
        centers = [model.module.net[2].p, model.module.temperature.item(), smoothing.value]
        values = [h.center(b, ensemble.scales[h.name]) for h, b in zip(explored, (0.5, 1.0, 0.1), strict=True)]
        assert centers == pytest.approx(values, rel=1e-6)
    assert [model.module.net[2].p, model.module.temperature.item(), smoothing.value] == own
    state = ensemble.state_dict()
    ensemble.load_state_dict(state)
    assert [model.module.net[2].p, model.module.temperature.item(), smoothing.value] == own
    record = records[0]
    assert record.hyperparameters["dropout"].base == 0.5
    assert len(set(record.hyperparameters["smoothing"].values)) == 2
    assert "temperature" in record.hyperparameters["temperature"].finding
    ensemble.close()
    assert [model.module.net[2].p, model.module.temperature.item(), smoothing.value] == [0.5, 1.0, 0.1]
    return own


def test_forward_hyperparameters_differ_by_replica_and_come_back():
    first, second = run(forward_values, 2)
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_what_shared_gradients_cannot_judge_is_refused_with_the_line_to_write():
    model = Dropping()
    o = optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(ValueError, match=r'dropout acts before .* gradients="local"'):
        hdet.Ensemble(o, [hdet.dropout(model)], total_steps=10, controller=hdet.controllers.Softmax())
    hdet.Ensemble(o, [hdet.dropout(model)], total_steps=10).close()  # spread, but not moved
    with pytest.raises(ValueError, match='"local" needs model='):
        hdet.Ensemble(o, total_steps=10, gradients="local")
    with pytest.raises(ValueError, match='"shared" or "local"'):
        hdet.Ensemble(o, total_steps=10, gradients="none", model=model)


def test_regularisers_judged_on_training_data_warn():
    model = Dropping()
    o = optim.AdamW(model.parameters(), lr=0.01)
    with pytest.warns(UserWarning, match="held_out=True"):
        hdet.Ensemble(o, [hdet.weight_decay(o)], total_steps=400, controller=hdet.controllers.Slope())


def in_one_process():
    torch.manual_seed(0)
    model = hdet.data_parallel(nn.Linear(2, 1))
    o = optim.SGD(model.parameters(), lr=0.1)
    ensemble = hdet.Ensemble(o, [hdet.learning_rate(o, spread=0.0)], interval=3, gradients="local", model=model)
    weights = []
    for number in range(3):
        x = torch.randn(4, 2, generator=torch.Generator().manual_seed(10 * number + ensemble.replicas.rank))
        model(x).square().mean().backward()
        o.step()
        o.zero_grad()
        if number == 2:
            weights.append(flat(model.parameters()))
        ensemble.step()
    weights.append(flat(model.parameters()))
    return weights


def test_in_one_process_too():
    (a, mean), (b, same) = hdet.in_process(in_one_process, 2)
    assert not torch.equal(a, b)
    assert torch.equal(mean, same)
    torch.testing.assert_close(mean, (a + b) / 2)
    assert math.isfinite(mean.sum())


def dropped_and_resumed():
    import gc

    torch.manual_seed(0)
    model = hdet.data_parallel(nn.Linear(2, 1))
    o = optim.SGD(model.parameters(), lr=0.1)
    heat = hdet.scalar("heat", 1.0, spread=0.5)
    ensemble = hdet.Ensemble(o, [heat], total_steps=4, interval=2, gradients="local", model=model)
    assert not model.require_backward_grad_sync
    for _ in range(4):
        model(torch.ones(1, 2)).sum().backward()
        o.step()
        ensemble.step(0.0)
    assert model.require_backward_grad_sync
    state = ensemble.state_dict()
    del ensemble
    gc.collect()
    assert heat.value == 1.0
    again = hdet.Ensemble(o, [heat], total_steps=4, interval=2, gradients="local", model=model)
    again.load_state_dict(state)
    assert model.require_backward_grad_sync  # that run is over
    del again
    gc.collect()
    once_more = hdet.Ensemble(o, [heat], total_steps=4, interval=2, gradients="local", model=model)
    assert not model.require_backward_grad_sync
    del once_more
    gc.collect()
    assert model.require_backward_grad_sync


def test_an_ensemble_that_is_dropped_or_over_leaves_gradients_shared():
    hdet.in_process(dropped_and_resumed, 2)


def broadcast_buffers():
    model = DistributedDataParallel(Dropping())
    o = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="broadcast_buffers=False"):
        hdet.Ensemble(o, [hdet.attribute(model.module, "temperature")], interval=2, model=model)


def test_buffers_that_ddp_would_overwrite_are_refused():
    run(broadcast_buffers, 2)
