"""One replica that is not finite is left out, restored and reported; what it costs the run is measured."""

import functools
import math
import random
import statistics

import pytest
import torch
from processes import run
from torch import nn, optim

import hdet
from hdet.controllers.report import Observation, Report
from hdet.controllers.steering import Steering
from hdet.guard.quarantine import NUMBERS, Census, take_census
from hdet.judge import Judged

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
        on_round=[lambda record: events.extend(record.events)], **{"guard": True, **options},
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
        optimizer, [hdet.learning_rate(optimizer, spread=0.3)], total_steps=9, interval=3, model=model, guard=True,
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
        optimizer, [hdet.learning_rate(optimizer, spread=0.3)], interval=3, model=model, guard=True, gradients="local",
        average_state=False,
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
        in_one_process("weights", 35, 2, guard=False)


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
        optimizer, [hdet.learning_rate(optimizer, spread=0.3)], total_steps=20, interval=5, model=model, guard=True,
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
        optimizer, [hdet.learning_rate(optimizer, spread=spread)], total_steps=20, interval=5, model=model, guard=True
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


def everybody(options):
    torch.manual_seed(0)
    model = hdet.data_parallel(nn.Linear(2, 1))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    events = []
    ensemble = hdet.Ensemble(
        optimizer, [hdet.learning_rate(optimizer, spread=0.3)], total_steps=40, interval=4, model=model, guard=True,
        on_round=[lambda record: events.extend(record.events)], **options,
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
    events, weights = hdet.in_process(lambda: everybody({"rollback": hdet.Rollback()}), 2)[0]
    assert any("rolled back" in event for event in events)
    assert all(math.isfinite(x) for row in weights for x in row)


def test_if_all_are_sick_and_there_is_no_snapshot_the_error_points_to_the_checkpoint():
    with pytest.raises(hdet.ReplicaError, match=r"no replica's weights are finite.*from /runs/7/step-4.*Rollback"):
        hdet.in_process(lambda: everybody({}), 2)


def divergent(rollback):
    """A hundred times too high a rate: SGD on a quadratic, which explodes at once."""
    rank = hdet.find_replicas().rank
    torch.manual_seed(0)
    model = hdet.data_parallel(nn.Linear(6, 1))
    optimizer = optim.SGD(model.parameters(), lr=10.0)  # 0.1 is a good one
    options = {"rollback": hdet.Rollback(most=20)} if rollback else {}
    ensemble = hdet.Ensemble(
        optimizer, [hdet.learning_rate(optimizer, spread=0.3)], total_steps=400, interval=5, model=model, guard=True,
        controller=hdet.Softmax(temperature=0.1), **options,
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
    with pytest.raises(hdet.ReplicaError, match=r"run has diverged.*lower learning rate.*rollback=hdet"):
        hdet.in_process(lambda: divergent(False), 2)


# The decisions, without a run


def row(how, skipped=0, layout=1, step=5, full=1):
    return [0.5, how, skipped, layout, step, full]


def test_who_counts():
    judged = Judged((1.0, 2.0, math.nan, 3.0), (1.0, 2.0, 3.0, 4.0), 0.5)
    table = [row(1), row(0), row(1), row(-1, step=3)]
    census = take_census(table, judged, guarded=True)
    assert census == Census((0,), (1, 2), (3,), (0, 0, 0, 0), True, 5, True)
    assert take_census(table, judged, guarded=False).healthy == (0, 2)
    assert str(census.view(judged).scores) == "(1.0, nan, nan, nan)"
    assert str(census.view(judged).probe) == "(1.0, nan, nan, nan)"
    assert len(table[0]) == 1 + NUMBERS
    nobody = take_census([row(1), row(1)], Judged((math.nan, math.nan), None, None), guarded=True)
    assert nobody.all_well  # weights are finite: scores alone leave nobody out if they would leave out all
    assert take_census([row(0), row(0)], judged, guarded=True).lost
    assert take_census([row(-1), row(-1)], judged, guarded=True).all_ended


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
    steering = Steering(Wild(asked), ["h"], True, hdet.Limits(per_round=2.0, overall=5.0))
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
        hdet.Ensemble(o, total_steps=5, limits=2.0)
