"""One replica that is not finite is left out, restored and reported; what it costs the run is measured."""

import copy
import functools
import math
import random
import re
import statistics
import warnings

import pytest
import torch
from processes import run
from torch import nn, optim

import hdet
from hdet._phases.guard.census import Census, Condition, Statistics, take_census
from hdet._phases.guard.phase import Guard
from hdet._phases.rollback.alarm import Alarm, Keeper
from hdet.controllers.report import Observation, Report
from hdet.controllers.steering import Steering

REPLICAS, STEPS, INTERVAL = 8, 120, 10
KINDS = {"loss": 1.02, "weights": 1.03, "moments": 1.03}


def teacher():
    torch.manual_seed(99)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))


def train(kind, at, sick, **options):
    """A run in which something of one replica becomes NaN at one step; its last loss on data kept aside, and events."""
    rank, events = hdet.find_replicas().rank, []
    truth = teacher()
    torch.manual_seed(0)
    model = hdet.data_parallel(nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1)))
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    ensemble = hdet.Ensemble(
        optimizer, [hdet.learning_rate(optimizer, spread=0.3)], total_steps=STEPS, interval=INTERVAL, model=model,
        on_round=[lambda record: events.extend(record.events)], **{"safety": hdet.Safety(guard=True), **options},
    )  # fmt: skip
    for step in range(STEPS):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1000 * step + rank))
        if step == at and rank == sick and kind == "weights":
            next(model.parameters()).data[0, 0] = math.nan
        if step == at and rank == sick and kind == "moments" and optimizer.state:
            optimizer.state[next(model.parameters())]["exp_avg"][0, 0] = math.nan
        loss = (model(x) - truth(x)).square().mean()
        if step == at and rank == sick and kind == "loss":
            loss = loss * math.nan
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        ensemble.step(loss)
    held_out = torch.randn(512, 6, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        final = (model(held_out) - truth(held_out)).square().mean().item()
    state = [v for s in optimizer.state.values() for v in s.values()]
    return final, events, [t.flatten()[:3].tolist() for t in (*model.parameters(), *state)]


def in_one_process(*args, **options):
    """All replicas end with the same, finite weights and moments; the loss and the events."""
    results = hdet.in_process(lambda: train(*args, **options), REPLICAS)
    assert all(result[2] == results[0][2] for result in results)
    assert all(math.isfinite(x) for row in results[0][2] for x in row)
    return results[0][:2]


@functools.cache
def healthy_loss():
    loss, said = in_one_process(None, 0, 0)
    assert not said
    return loss


def cost(kind, draws):
    """The median over `draws` random steps and replicas of the last loss over that of a healthy run."""
    healthy, found = healthy_loss(), []
    for seed in range(draws):
        draw = random.Random(f"{kind}{seed}")
        loss, events = in_one_process(kind, draw.randrange(1, STEPS), draw.randrange(REPLICAS))
        assert any("guard:" in event for event in events)
        found.append(loss / healthy)
    return statistics.median(found)


@pytest.mark.parametrize("kind", KINDS)
def test_one_sick_replica_costs_little(kind):
    assert cost(kind, 2) < KINDS[kind]


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_one_sick_replica_costs_little_at_ten_random_steps(kind):
    assert cost(kind, 10) < KINDS[kind]


def sick_from_the_start(steps):
    """Local gradients; replica 1 has NaN for its first round, so none of its optimizer state exists at its end."""
    rank, events = hdet.find_replicas().rank, []
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    ensemble = hdet.Ensemble(
        optimizer, [hdet.learning_rate(optimizer, spread=0.3)], total_steps=9, interval=3, model=model,
        safety=hdet.Safety(guard=True),
        gradients="local", on_round=[lambda record: events.extend(record.events)],
    )  # fmt: skip
    for step in range(9):
        loss = model(torch.full((2, 3), 0.1 * step + rank)).square().mean()
        loss = loss * math.nan if rank == 1 and step < steps else loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step(loss)
    state = [v.tolist() for s in optimizer.state.values() for v in s.values()]
    return events, [p.tolist() for p in model.parameters()], state


def test_a_replica_that_has_not_taken_a_step_yet_is_given_weights_and_state():
    (events, *ours), (_, *others) = hdet.in_process(lambda: sick_from_the_start(3), 2)
    assert events[:2] == [
        "guard: skipped 3 steps on replica 1, as the gradient was not finite",
        "guard: replica 1 was not finite at step 3 and got the average of the others",
    ]
    assert ours == others
    assert all(math.isfinite(x) for x in torch.tensor(ours[0][0]).flatten())


def with_state_of_its_own():
    rank = hdet.find_replicas().rank
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    ensemble = hdet.Ensemble(
        optimizer, [hdet.learning_rate(optimizer, spread=0.3)], interval=3, model=model,
        safety=hdet.Safety(guard=True), gradients="local",
        averaging=hdet.Averaging(state=False),
    )  # fmt: skip
    for step in range(3):
        loss = model(torch.full((2, 3), 0.1 * step + rank)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2 and rank == 1:
            model.weight.data.fill_(math.nan)
            optimizer.state[model.weight]["exp_avg"].fill_(math.nan)
        before = optimizer.state[model.weight]["exp_avg"].tolist()
        ensemble.step(loss)
    return before, optimizer.state[model.weight]["exp_avg"].tolist()


def test_a_sick_replica_is_given_state_and_the_others_keep_theirs():
    (first, ours), (_, given), (third, others) = hdet.in_process(with_state_of_its_own, 3)
    assert ours == first
    assert others == third != first
    assert given == first


def test_without_the_guard_the_run_is_lost_and_the_error_says_what_to_do():
    with pytest.raises(hdet.ReplicaError, match=r"diverged: the loss of every replica is nan at step 40.*rollback="):
        in_one_process("weights", 35, 2, safety=hdet.Safety(guard=False))


def test_it_is_said_who_was_left_out():
    _, events = in_one_process("weights", 35, 2)
    assert "guard: replica 2 was not finite at step 38 and got the average of the others" in events
    assert "guard: skipped 3 steps on all replicas, as the gradient was not finite" in events


def on_processes():
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(6, 1))
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    events = []
    ensemble = hdet.Ensemble(
        optimizer, [hdet.learning_rate(optimizer, spread=0.3)], total_steps=20, interval=5, model=model,
        safety=hdet.Safety(guard=True),
        gradients="local", on_round=[lambda record: events.extend(record.events)],
    )  # fmt: skip
    for step in range(20):
        if step == 7 and ensemble.replicas.rank == 1:
            optimizer.state[model.module.weight]["momentum_buffer"].fill_(math.nan)
        loss = model(torch.ones(4, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step(loss)
    moments = [s["momentum_buffer"].flatten().tolist() for s in optimizer.state.values()]
    return events, moments, [p.flatten().tolist() for p in model.parameters()]


def test_local_gradients_on_real_processes():
    first, second, third = run(on_processes, 3)
    assert first == second == third
    assert first[0] == [
        "guard: skipped 2 steps on replica 1, as the gradient was not finite",
        "guard: replica 1 was not finite at step 10 and got the average of the others",
    ]
    assert all(math.isfinite(x) for row in (*first[1], *first[2]) for x in row)


def a_batch_of_nan(spread):
    """The first replica sees it, so that DDP gives its statistics to all."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    ensemble = hdet.Ensemble(
        optimizer,
        [hdet.learning_rate(optimizer, spread=spread)],
        total_steps=20,
        interval=5,
        model=model,
        safety=hdet.Safety(guard=True),
    )
    for step in range(20):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        loss = (model(x * math.nan if step == 7 and ensemble.replicas.rank == 0 else x) - x[:, :1]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step(loss)
    return [t.flatten().tolist() for t in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("spread", [0.0, 0.3])
@pytest.mark.filterwarnings("ignore:guard")
def test_a_batch_of_nan_does_not_cost_the_statistics_of_batch_norm(spread):
    first, second = run(a_batch_of_nan, 2, spread)
    assert first == second
    assert all(math.isfinite(x) for row in first for x in row)


class Masked(nn.Module):
    """A norm, whose statistics training does not use, and a mask that is meant not to be finite."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))

    def forward(self, x):
        return self.layers(x)


def spoiled(what, sick, at=7, options=None):
    """Statistics, or what follows the weights, become NaN at one step on the `sick` replicas."""
    rank, events = hdet.find_replicas().rank, []
    torch.manual_seed(0)
    module = Masked()
    model = hdet.data_parallel(module)
    model.broadcast_buffers = False  # DDP would give all replicas the first one's
    optimizer = optim.AdamW(module.parameters(), lr=0.01)
    ema = optim.swa_utils.AveragedModel(module, use_buffers=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ensemble = hdet.Ensemble(
            optimizer, [hdet.learning_rate(optimizer, spread=0.3)], total_steps=20, interval=5, model=model,
            on_round=[lambda record: events.append(record.events)],
            averaging=hdet.Averaging(followers=[ema]), **(options or {}),
        )  # fmt: skip
        for step in range(20):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = (model(x) - x[:, :1]).square().mean()
            loss.backward()
            if step == at and rank in sick:
                (module.layers[1].running_var if what == "buffer" else next(ema.parameters()).data)[0] = math.nan
            optimizer.step()
            optimizer.zero_grad()
            ensemble.step(loss)
    finite = all(bool(t.isfinite().all()) for t in (*module.parameters(), module.layers[1].running_var))
    return events, [str(w.message) for w in said], finite


@pytest.mark.parametrize("options", [{}, {"safety": hdet.Safety(rollback=hdet.Rollback())}])
@pytest.mark.parametrize(
    ("what", "sick", "says"),
    [
        (
            "buffer",
            (1,),
            r"the buffer 'module.layers.1.running_var' was not finite on replica 1 at step 10 and is aver",
        ),
        ("buffer", (0, 1), r"the buffer 'module.layers.1.running_var' was not finite on all replicas at step 10\. "),
        ("follower", (1,), r"'module.layers.0.weight' of followers\[0\] was not finite on replica 1 at step 10"),
    ],
)
def test_statistics_that_are_not_finite_are_told_at_once_on_all_replicas(what, sick, says, options):
    first, second = run(spoiled, 2, what, sick, 7, options)
    assert first == second
    events, warned, _ = first
    assert [len(round_events) for round_events in events] == [0, 1, 0, 0]  # once, and the mask is left alone
    assert re.match(says, events[1][0])
    assert "hdet.Safety(guard=True)" in events[1][0]
    assert warned == list(events[1])


class Table(nn.Module):
    """A module that saves what is no tensor, as those of quantization do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.register_buffer("none", torch.empty(0))

    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state):
        pass


class Odd(Table):
    """One whose tensors have no names."""

    def named_parameters(self, *args, **kwargs):
        if not kwargs:
            raise RuntimeError("no names")
        return super().named_parameters(*args, **kwargs)


def a_follower_of_nan(kind):
    model, events = nn.Linear(2, 1), []
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    follower = kind()
    ensemble = hdet.Ensemble(
        optimizer, [hdet.learning_rate(optimizer)], total_steps=10, interval=5, model=model,
        averaging=hdet.Averaging(followers=[Table(), follower]),
        on_round=[lambda record: events.extend(record.events)],
    )  # fmt: skip
    for step in range(10):
        loss = model(torch.ones(4, 2)).square().mean()
        loss.backward()
        optimizer.step()
        if step == 3:
            follower.weight.data.fill_(math.nan)
        ensemble.step(loss)
    return [event.partition(" was ")[0] for event in events if "not finite" in event]


@pytest.mark.parametrize(("kind", "name"), [(Table, "'weight' of followers[1]"), (Odd, "a tensor")])
@pytest.mark.filterwarnings("ignore")
def test_to_name_a_tensor_never_raises(kind, name):
    assert hdet.in_process(a_follower_of_nan, 2, kind) == [[name]] * 2


@pytest.mark.parametrize("at", [0, 7])  # the first forward pass comes before the first step
@pytest.mark.parametrize("sick", [(1,), (0, 1)])
def test_with_the_guard_statistics_are_put_back_and_that_is_an_event(sick, at):
    first, second = run(spoiled, 2, "buffer", sick, at, {"safety": hdet.Safety(guard=True)})
    assert first == second
    events, _, finite = first
    assert finite
    where = "all replicas" if len(sick) == 2 else "replica 1"
    assert [event for round_events in events for event in round_events] == [
        f"guard: the buffer 'module.layers.1.running_var' was not finite on {where} at step {at + 5 - at % 5} and was "
        "put back to its value at the start of the round"
    ]


def norms(guard, events):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    ensemble = hdet.Ensemble(
        optimizer, [hdet.learning_rate(optimizer)], total_steps=40, interval=5, model=model,
        safety=hdet.Safety(guard=guard),
        on_round=[lambda record: events.extend(record.events)],
    )  # fmt: skip
    return {"model": model, "optimizer": optimizer, "ensemble": ensemble}


def step_with(parts, x):
    loss = parts["model"](x).square().mean()
    parts["optimizer"].zero_grad()
    loss.backward()
    parts["optimizer"].step()
    parts["ensemble"].step(loss)


def resumed_from_spoiled(path, order, sick, stop=10):
    """The statistics before and after two rounds of a run whose first norm was NaN when it was saved."""
    rank, events = hdet.find_replicas().rank, []
    parts = norms(False, [])
    for step in range(stop):
        step_with(parts, torch.randn(8, 6, generator=torch.Generator().manual_seed(step)) * 3 + 5)
    if rank in sick:
        parts["model"][1].running_mean.fill_(math.nan)
    saved = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
    hdet.save(path, parts)
    parts["ensemble"].close()
    before = parts["model"][3].running_var.clone()
    again = norms(True, events)
    if order == "hdet.load":
        hdet.load(path, again)
    else:
        for name in order:
            again[name].load_state_dict(saved[name])
    moved = []
    while again["ensemble"].progress["step"] < stop - stop % 5 + 10:
        step_with(again, torch.randn(8, 6) * 3 + 5)
        moved.append(again["model"][3].running_var.clone())
    nearest = min((moved[4 - stop % 5] - v).abs().max().item() for v in (before, torch.ones(4)))
    kept = (moved[4 - stop % 5] - before).abs().max().item() == nearest
    return kept, bool(again["model"][1].running_mean.isfinite().all()), [e for e in events if "guard" in e]


ORDERS = ["hdet.load", ("model", "optimizer", "ensemble"), ("ensemble", "optimizer", "model")]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.filterwarnings("ignore")
def test_a_resume_from_spoiled_statistics_keeps_the_others(tmp_path, order):
    first, second = hdet.in_process(resumed_from_spoiled, 2, tmp_path, order, (0, 1))
    assert first == second
    kept, finite, events = first
    assert kept
    assert not finite
    assert events == [  # once, and nothing that is not so
        "guard: the buffer '1.running_mean' was not finite on all replicas at step 15 and has no finite value to go "
        "back to, as that was loaded: evaluation may not work"
    ]


@pytest.mark.filterwarnings("ignore")
def test_a_replica_that_was_resumed_with_spoiled_statistics_is_given_those_of_the_others(tmp_path):
    first, second = hdet.in_process(resumed_from_spoiled, 2, tmp_path, "hdet.load", (1,), 7)
    assert first == second
    kept, finite, events = first
    assert kept
    assert finite
    assert [event.partition(" at step")[0] for event in events] == [
        "guard: the buffer '1.running_mean' was not finite on replica 1", "guard: replica 1 was not finite",
    ]  # fmt: skip


def gone_back(order, at):
    """Statistics of step 5, loaded into an ensemble that is farther, and then a batch of NaN."""
    events = []
    parts = norms(True, events)
    for _ in range(5):
        step_with(parts, torch.randn(8, 6) + 5)
    saved = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
    there = [t.clone() for t in parts["model"].buffers() if t.is_floating_point()]
    for _ in range(at):
        step_with(parts, torch.randn(8, 6) - 50)
    for name in order:
        parts[name].load_state_dict(saved[name])
    step_with(parts, torch.full((8, 6), math.nan))
    parts["ensemble"].converge()
    now = [t for t in parts["model"].buffers() if t.is_floating_point()]
    return all(map(torch.equal, there, now)), [event for event in events if "put back" in event]


@pytest.mark.parametrize("order", ORDERS[1:])
@pytest.mark.parametrize("at", [20, 22])
@pytest.mark.filterwarnings("ignore")
def test_statistics_go_back_to_those_that_were_loaded(order, at):
    first, second = hdet.in_process(gone_back, 2, order, at)
    assert first == second
    assert first[0]
    assert len(first[1]) == 1


def test_only_what_is_spoiled_is_put_back():
    good, bad, lost = torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(2)
    statistics = Statistics(mends=True)
    statistics.keep([good, bad, lost])
    lost.fill_(math.nan)
    statistics.keep([good, bad, lost], "loaded")
    good.fill_(2)
    statistics.keep([good, bad, lost], "late")
    good.fill_(3)
    bad.fill_(math.inf)
    assert statistics.mend([good, bad, lost]) == (1, 2, 1)  # by dtype: good, lost, bad
    assert good.tolist() == [3, 3]
    assert bad.tolist() == [1, 1]
    assert statistics.mend([good, bad, lost]) == (-1, 0, 0)  # told once


class Spectral(nn.Module):
    """A filter of complex numbers."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.out = nn.Linear(8, 1)
        self.register_buffer("phase", torch.ones(5, dtype=torch.complex64))

    def forward(self, x):
        return self.out(torch.fft.irfft(torch.fft.rfft(x) * self.filter * self.phase, n=8))


def with_complex_numbers(kind, options, gradients="shared"):
    rank, events = hdet.find_replicas().rank, []
    torch.manual_seed(0)
    module = Spectral()
    model = hdet.data_parallel(module)
    model.broadcast_buffers = False
    optimizer = optim.AdamW(module.parameters(), lr=0.01)
    if kind == "state":
        optimizer = optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    ensemble = hdet.Ensemble(
        optimizer, [hdet.learning_rate(optimizer, spread=0.3)], total_steps=20, interval=5, model=model,
        gradients=gradients, on_round=[lambda record: events.extend(record.events)], **options,
    )  # fmt: skip
    odd = complex(0.0, math.nan)
    for step in range(20):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = (model(x) - x[:, :1]).square().mean()
        loss.backward()
        if step == 9 and kind == "gradient":
            module.filter.grad[1] = odd
        optimizer.step()
        if step == 9 and rank == 1 and kind in ("weights", "buffer", "state"):
            state = optimizer.state[module.filter].get("momentum_buffer")
            {"weights": module.filter.data, "buffer": module.phase, "state": state}[kind][0] = odd
        optimizer.zero_grad()
        ensemble.step(loss)
    held = [*module.parameters(), module.phase, *(v for s in optimizer.state.values() for v in s.values())]
    return events, [torch.view_as_real(t.detach()).tolist() if t.is_complex() else t.tolist() for t in held]


@pytest.mark.parametrize(
    "options",
    [
        {"safety": hdet.Safety(guard=True)},
        {"safety": hdet.Safety(guard=True, rollback=True), "averaging": hdet.Averaging(outer_step=hdet.Nesterov())},
    ],
)
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("none", None),
        ("gradient", "guard: skipped 1 step on all replicas, as the gradient was not finite"),
        ("weights", "guard: replica 1 was not finite at step 10 and got the average of the others"),
        ("state", "guard: replica 1 was not finite at step 10 and got the average of the others"),
        ("buffer", "guard: the buffer 'module.phase' was not finite on replica 1 at step 10 and was put back to its "
                   "value at the start of the round"),
    ],
)  # fmt: skip
def test_the_guard_sees_complex_numbers(kind, says, options):
    results = hdet.in_process(lambda: with_complex_numbers(kind, options), 2)
    assert results == run(with_complex_numbers, 2, kind, options)  # DDP
    assert results[0] == results[1]
    events, tensors = results[0]
    assert events == ([] if says is None else [says])
    assert all(torch.tensor(t).isfinite().all() for t in tensors)


def test_complex_gradients_can_be_local():
    first, second = run(with_complex_numbers, 2, "none", {"safety": hdet.Safety(guard=True)}, "local")
    assert first == second


def test_complex_weights_that_are_not_finite_are_no_snapshot():
    tensors = [torch.tensor([complex(1, math.nan)])]
    keeper = Keeper(hdet.Rollback(), Alarm())
    keeper.keep(tensors, [], hdet.find_replicas(), 5)
    assert keeper.kept_at is None


def huge(value, at, options):
    """One gradient that is finite, but whose square is not in single precision, or one loss, on replica 1."""
    rank, events = hdet.find_replicas().rank, []
    torch.manual_seed(0)
    model = hdet.data_parallel(nn.Linear(3, 1))
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    ensemble = hdet.Ensemble(
        optimizer, [hdet.learning_rate(optimizer, spread=0.3)], total_steps=20, interval=5, model=model,
        on_round=[lambda record: events.extend(record.events)], **options,
    )  # fmt: skip
    for step in range(20):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = (model(x) - x[:, :1]).square().mean()
        loss.backward()
        if step == at and value == "gradient":
            next(model.parameters()).grad[0, 0] = 1e30
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step(loss.detach() * math.inf if step == at and value == "loss" and rank == 1 else loss)
    return events


_MOMENTS = r"no replica's optimizer state is finite \(exp_avg_sq of the parameter 'module.weight'.*clip"


def test_what_cannot_be_named_is_left_out():
    model = nn.Linear(2, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    ensemble = hdet.Ensemble(
        optimizer,
        [hdet.learning_rate(optimizer, spread=0.0)],
        total_steps=4,
        model=model,
        safety=hdet.Safety(guard=True),
    )
    told = ensemble.engine.phase(Guard).what_is_lost
    assert told(Census((), (0, 1), odd={0: -1, 1: -1})) == "no replica's weights are finite"
    assert told(Census((), (0, 1), odd={0: 1, 1: 1})) == "no replica's weights are finite (the parameter 'bias')"
    ensemble.close()


def test_moments_that_overflow_are_not_called_weights():
    with pytest.raises(hdet.ReplicaError, match=_MOMENTS):
        hdet.in_process(lambda: huge("gradient", 7, {"safety": hdet.Safety(guard=True)}), 2)
    options = {"safety": hdet.Safety(guard=True, rollback=hdet.Rollback())}
    with pytest.raises(hdet.ReplicaError, match=_MOMENTS + ".*at step 5, before the first full round"):
        hdet.in_process(lambda: huge("gradient", 2, options), 2)
    first, second = hdet.in_process(lambda: huge("gradient", 7, options), 2)
    assert first == second
    assert re.match(r"rolled back at step 10 to the weights of step 5: " + _MOMENTS, first[0])


def test_a_rollback_tells_the_loss_that_was_seen():
    first, second = hdet.in_process(lambda: huge("loss", 7, {"safety": hdet.Safety(rollback=hdet.Rollback())}), 2)
    assert first == second
    assert "the loss was inf on replica 1" in first[0]


def everybody(rollback=None):
    torch.manual_seed(0)
    model = hdet.data_parallel(nn.Linear(2, 1))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    events = []
    ensemble = hdet.Ensemble(
        optimizer, [hdet.learning_rate(optimizer, spread=0.3)], total_steps=40, interval=4, model=model,
        safety=hdet.Safety(guard=True, rollback=rollback),
        on_round=[lambda record: events.extend(record.events)],
    )  # fmt: skip
    ensemble.last_checkpoint = "/runs/7/step-4"
    for step in range(40):
        if step == 14:
            for p in model.parameters():
                p.data.fill_(math.nan)
        loss = (model(torch.ones(2, 2)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step(loss)
    return events, [p.flatten().tolist() for p in model.parameters()]


def test_if_all_are_sick_the_run_goes_back_to_the_snapshot():
    events, weights = hdet.in_process(lambda: everybody(hdet.Rollback()), 2)[0]
    assert any("rolled back" in event for event in events)
    assert all(math.isfinite(x) for row in weights for x in row)


def test_if_all_are_sick_and_there_is_no_snapshot_the_error_points_to_the_checkpoint():
    with pytest.raises(
        hdet.ReplicaError, match=r"no replica's weights are finite.*from /runs/7/step-4.*Safety\(rollback"
    ):
        hdet.in_process(lambda: everybody(), 2)


def divergent(rollback):
    """A hundred times too high a rate: SGD on a quadratic, which explodes at once."""
    rank = hdet.find_replicas().rank
    torch.manual_seed(0)
    model = hdet.data_parallel(nn.Linear(6, 1))
    optimizer = optim.SGD(model.parameters(), lr=10.0)  # 0.1 is a good one
    ensemble = hdet.Ensemble(
        optimizer, [hdet.learning_rate(optimizer, spread=0.3)], total_steps=400, interval=5, model=model,
        safety=hdet.Safety(guard=True, rollback=hdet.Rollback(most=20) if rollback else None),
        controller=hdet.controllers.Softmax(temperature=0.1),
    )  # fmt: skip
    losses = []
    for step in range(400):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(2 * step + rank))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step(loss)
    return losses[0], losses[-1]


def test_a_rate_that_diverges_at_once_recovers_with_rollback():
    first, last = hdet.in_process(lambda: divergent(True), 2)[0]
    assert math.isfinite(last)
    assert last < first


def test_without_rollback_the_error_says_what_to_do():
    with pytest.raises(
        hdet.ReplicaError, match=r"run has diverged.*lower learning rate.*safety=hdet\.Safety\(rollback=True\)"
    ):
        hdet.in_process(lambda: divergent(False), 2)


# The decisions, without a run


def row(well, skipped=0, layout=1):
    return [*Condition(well, skipped, layout)]


def test_who_counts():
    scores = (1.0, 2.0, math.nan, 3.0)
    table = [row(1), row(0), row(1), row(1)]
    census = take_census(table, (3,), scores, by_scores=True)
    assert (census.healthy, census.sick, census.ended) == ((0,), (1, 2), (3,))
    assert census.same_state
    assert take_census(table, (3,), scores, by_scores=False).healthy == (0, 2)
    assert str(census.shown(scores)) == "(1.0, nan, nan, nan)"
    nobody = take_census([row(1), row(1)], (), (math.nan, math.nan), by_scores=True)
    assert nobody.all_well  # weights are finite: scores alone leave nobody out if they would leave out all
    assert take_census([row(0), row(0)], (), scores, by_scores=True).lost
    assert take_census([row(1), row(1)], (0, 1), scores, by_scores=True).all_ended


class Wild:
    """A controller that asks for anything."""

    needs_score = True

    def __init__(self, scale):
        self.asked = scale

    def init(self, names):
        return {name: {"scale": 1.0, "memory": 0.0} for name in names}

    def update(self, state, report):
        return {name: {"scale": self.asked, "memory": math.nan} for name in state}


@pytest.mark.parametrize("asked", [math.nan, math.inf, -math.inf, 0.0, -3.0, 1e9, 1e-9, 1.5])
def test_no_controller_moves_a_scale_farther_than_the_limits(asked):
    seen = {"h": Observation(1.0, 1.0, 0.0, (0.5, 1.5))}
    steering = Steering(Wild(asked), ["h"], limits=hdet.Limits(per_round=2.0, overall=5.0))
    scale = 1.0
    for round in range(1, 6):
        steering.update(Report(round, (1.0, 2.0), seen))
        before, scale = scale, steering.scales["h"]
        assert math.isfinite(scale)
        assert 0.2 <= scale <= 5.0
        assert 0.5 <= scale / before <= 2.0
    expected = {1e9: 5.0, 1e-9: 0.2, 1.5: 1.5}.get(asked, 1.0)
    assert scale == pytest.approx(expected)
    if not math.isfinite(asked):
        assert steering.state_dict()["h"]["memory"] == 0.0, "a controller that has lost its way begins anew"


def test_bad_limits_are_refused():
    with pytest.raises(ValueError, match="per_round must be a factor of at least 1"):
        hdet.Limits(per_round=0.5)
    o = optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(TypeError, match=r"limits must be an hdet\.Limits"):
        hdet.Ensemble(o, total_steps=5, safety=hdet.Safety(limits=2.0))
