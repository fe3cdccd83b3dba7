"""A probe in the ensemble: the same data for all, the start of the round shared out, resume, refusals, cost."""

import math
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from processes import run
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet._engine import engine
from hdet._phases.averaging import Averaging

X = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i], Y[i]


def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


class Watching(hdet.controllers.LineSearch):
    """A line search that keeps its reports."""

    def update(self, state, report):
        reports.append(report)
        return super().update(state, report)


reports = []


def make(controller=None, total_steps=40, interval=4, norm=False, spread=2.0, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)) if norm else nn.Linear(3, 1)
    model = hdet.data_parallel(net)
    o = optim.SGD(model.parameters(), lr=1e-3)
    rates = [hdet.learning_rate(o, spread=spread, ladder="log")]
    probe = hdet.Probe(Data(), loss_fn, size=16, chunk=4)
    ensemble = hdet.Ensemble(
        o, rates, total_steps=total_steps, interval=interval, controller=controller or Watching(), probe=probe,
        model=model, **options,
    )  # fmt: skip
    return model, o, ensemble, probe


def train(model, o, ensemble, steps, first=0):
    rank = ensemble.replicas.rank
    for step in range(first, first + steps):
        g = torch.Generator().manual_seed(100 * step + rank)
        chosen = torch.randint(len(X), (8,), generator=g)
        loss = loss_fn(model, (X[chosen], Y[chosen]))
        loss.backward()
        o.step()
        o.zero_grad()
        ensemble.step(loss)


def what_the_controller_sees(norm):
    """Scores by hand: the loss of every replica's weights, and of the round's first weights, on the same samples."""
    reports.clear()
    model, o, ensemble, _ = make(norm=norm)
    train(model, o, ensemble, 4)
    assert reports[-1].start is None  # replicas may begin the run with noisy copies
    assert reports[-1].probe is not None
    twin = hdet.Probe(Data(), loss_fn, size=16, chunk=4)
    first = twin.score(model, 1, ensemble.replicas).item()
    buffers = [b.clone() for b in model.buffers()]
    train(model, o, ensemble, 3, 4)
    moved = [b.clone() for b in model.buffers()]
    assert not norm or any(not torch.equal(a, b) for a, b in zip(buffers, moved, strict=True))
    g = torch.Generator().manual_seed(100 * 7 + ensemble.replicas.rank)
    chosen = torch.randint(len(X), (8,), generator=g)
    loss = loss_fn(model, (X[chosen], Y[chosen]))
    loss.backward()
    o.step()
    own = twin.score(model, 1, ensemble.replicas).item()
    ensemble.step(loss)
    report = reports[-1]
    assert report.start == pytest.approx(first, rel=1e-6)
    assert report.probe[ensemble.replicas.rank] == pytest.approx(own, rel=1e-6)
    assert report.total_steps == 40
    assert len(set(report.probe)) == ensemble.replicas.size
    ensemble.close()
    return report.probe, report.start


@pytest.mark.parametrize("norm", [False, True])
def test_the_controller_sees_every_replicas_loss_on_the_same_data(norm):
    first, second = run(what_the_controller_sees, 2, norm)
    assert first == second


def test_in_one_process_too():
    assert len(set(map(str, hdet.in_process(what_the_controller_sees, 3, False)))) == 1


def resume():
    whole = make()
    train(*whole[:3], 14)
    model, o, ensemble, _ = make()
    train(model, o, ensemble, 10)
    saved = model.state_dict(), o.state_dict(), ensemble.state_dict()
    model, o, ensemble, _ = make()
    model.load_state_dict(saved[0])
    o.load_state_dict(saved[1])
    ensemble.load_state_dict(saved[2])
    train(model, o, ensemble, 4, 10)
    assert ensemble.state_dict()["phases"]["control"] == whole[2].state_dict()["phases"]["control"]
    for a, b in zip(model.parameters(), whole[0].parameters(), strict=True):
        assert torch.equal(a, b)


def test_resume_in_mid_round_is_exact():
    run(resume, 2)


def a_low_start(active=1.0):
    """Thirty times too low, on a quadratic whose best rate is known: the line search finds it in one short run."""
    controller = hdet.Auto(hdet.controllers.LineSearch(active=active))
    model, o, ensemble, _ = make(controller=controller, total_steps=200, interval="auto", on_round=[records.append])
    train(model, o, ensemble, 200)
    return ensemble.scales["learning_rate"], loss_fn(model, (X, Y)).item()


records = []


def test_a_rate_that_is_far_too_low_is_raised():
    records.clear()
    found = hdet.in_process(a_low_start, 4)
    assert len(set(found)) == 1
    assert found[0][0] > 30
    assert found[0][1] < 0.01
    assert "line search" in records[0].events[0]
    last = records[-2].hyperparameters["learning_rate"]
    assert last.finding.startswith("learning_rate: x")
    assert set(last.memory) >= {"slope", "curvature"}


def test_a_line_search_that_has_ended_probes_no_more():
    records.clear()
    hdet.in_process(a_low_start, 4, 0.25)
    assert {record.step for record in records if record.probe is not None} == set(range(5, 51, 5))
    assert {record.step for record in records} == set(range(5, 201, 5))


def test_what_cannot_work_is_refused():
    o = optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="LineSearch needs a probe"):
        hdet.Ensemble(o, total_steps=10, controller=hdet.controllers.LineSearch())
    with pytest.raises(TypeError, match=r"probe must be an hdet\.Probe or a callable"):
        hdet.Ensemble(o, total_steps=10, probe=3)
    with pytest.raises(ValueError, match="a Probe needs model="):
        hdet.Ensemble(o, total_steps=10, probe=hdet.Probe(Data(), loss_fn))
    with pytest.raises(ValueError, match="design must be"):
        hdet.Ensemble(o, total_steps=10, design="random")


def costs():
    """A slow probe: the record says what it cost."""
    calls, spent = [], []

    def slow(index):
        began = time.perf_counter()
        calls.append(index)
        time.sleep(0.03)
        spent.append(time.perf_counter() - began)  # longer than that on a busy machine
        return float(dist.get_rank())

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1))
    o = optim.SGD(model.parameters(), lr=1e-3)
    seen = []
    ensemble = hdet.Ensemble(
        o,
        total_steps=12,
        interval=4,
        controller=hdet.controllers.Slope(),
        probe=slow,
        model=model,
        on_round=[seen.append],
    )
    began = time.perf_counter()
    train(model, o, ensemble, 12)
    whole = time.perf_counter() - began
    ensemble.close()
    assert calls == [0, 1, 1, 2, 2]
    assert sum(r.probe_seconds for r in seen) == pytest.approx(sum(spent), rel=0.2)
    assert sum(r.round_seconds for r in seen) == pytest.approx(whole, rel=0.2)
    assert all(r.converge_seconds + r.probe_seconds < r.round_seconds for r in seen)


def test_the_record_says_what_the_probe_cost():
    run(costs, 2)


class Slow:
    """A controller that takes its time."""

    needs_score = True

    def __init__(self):
        self.spent = 0.0

    def init(self, names):
        return {name: {"scale": 1.0} for name in names}

    def update(self, state, report):
        began = time.perf_counter()
        time.sleep(0.04)
        self.spent += time.perf_counter() - began
        return state


def costs_of_converging():
    """A slow controller, and weights that take a while to average."""
    spent = []

    def timed(call):
        def wrapped(*args):
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                spent.append(time.perf_counter() - began)

        return wrapped

    engine.compare, Averaging.after = timed(engine.compare), timed(Averaging.after)
    model = DistributedDataParallel(nn.Linear(3, 200_000))
    o = optim.SGD(model.parameters(), lr=1e-3)
    seen, controller = [], Slow()
    ensemble = hdet.Ensemble(o, total_steps=12, interval=3, controller=controller, model=model, on_round=[seen.append])
    for _ in range(12):
        loss = model(torch.ones(1, 3)).square().mean()
        loss.backward()
        o.step()
        o.zero_grad()
        ensemble.step(loss)
    ensemble.close()
    assert controller.spent >= 3 * 0.04
    assert len(spent) == 8
    assert sum(r.converge_seconds for r in seen) == pytest.approx(sum(spent) + controller.spent, rel=0.2)


def test_the_record_says_what_averaging_and_the_controller_cost():
    run(costs_of_converging, 2)


def digits_under_ddp():
    """The real task with BatchNorm, under DDP's default, which gives every replica rank 0's statistics: what the record
    says, and the loss of this replica's weights on the same samples, by a twin outside DDP.
    """
    from hdet_lab.tasks import make as make_task

    rank, task = dist.get_rank(), make_task("digits", "smoke", 0)
    model = DistributedDataParallel(task.model())
    o = optim.SGD(model.parameters(), lr=0.05)
    seen = []
    ensemble = hdet.Ensemble(
        o, [hdet.learning_rate(o, spread=0.9)], total_steps=400, interval=4, controller=hdet.controllers.LineSearch(),
        model=model, probe=hdet.Probe(lambda index: [task.batch(1000 + index)], task.loss), on_round=[seen.append],
    )  # fmt: skip
    for step in range(8):
        loss = task.loss(model, task.batch(step, rank, 2))
        loss.backward()
        o.step()
        o.zero_grad()
        if step == 7:
            twin = task.model()
            twin.load_state_dict(model.module.state_dict())
            before = [b.clone() for b in model.buffers()]
        ensemble.step(loss)
    twin.train()  # batch statistics; the task has no dropout
    with torch.no_grad():
        own = task.loss(twin, task.batch(1001)).item()
    for b in before:
        dist.all_reduce(b)
    kept = all(torch.allclose(b, total / 2) for b, total in zip(model.buffers(), before, strict=True) if b.dim())
    return own, seen[-1].probe, kept


def test_the_probe_gives_the_loss_at_the_replicas_weights_on_digits():
    (first, probe, kept), (second, again, _) = run(digits_under_ddp, 2)
    assert kept  # converge averaged the running statistics of training: the probe has left them alone
    assert probe == again
    assert probe == pytest.approx((first, second), rel=1e-6)
    assert first != pytest.approx(second, rel=1e-3)


def found_before_the_run():
    """Auto in a long run: find_lr() sets the schedule and leaves everything else as it was."""
    seen = []
    model, o, ensemble, _ = make(controller=hdet.Auto(), total_steps=5000, interval="auto", on_round=[seen.append])
    assert ensemble.interval == 10
    before = [p.detach().clone() for p in model.parameters()]

    def step(index):
        chosen = torch.randint(len(X), (8,), generator=torch.Generator().manual_seed(index))
        loss_fn(model, (X[chosen], Y[chosen])).backward()

    found = ensemble.find_lr(step)
    (first, _), (second, _) = found.fine[:2]
    assert math.log(second / first) == pytest.approx(6 * 2 * 0.02 * math.sqrt(8000 / 5000))  # scored every 6 steps
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert o.param_groups[0]["lr"] == pytest.approx(found.rate)
    assert found.scale == pytest.approx(found.rate / 1e-3)
    assert ensemble.find_lr(step).rate == pytest.approx(found.rate, rel=0.25)  # a cell of a notebook is run again
    assert ensemble.scales["learning_rate"] == 1.0  # what is trained is what the groups show
    train(model, o, ensemble, 25)
    finding = seen[-1].hyperparameters["learning_rate"].finding
    assert finding == "learning_rate: not explored"
    with ensemble.consensus():
        assert loss_fn(model, (X, Y)).item() < 0.5
    with pytest.raises(ValueError, match=r"find_lr\(\) comes before the first step, got 25 steps"):
        ensemble.find_lr(step)
    _, _, again, _ = make(controller=hdet.Auto(), total_steps=5000, interval="auto")
    again.load_state_dict(ensemble.state_dict())
    assert again.find_lr(step) is None  # what was found is in the schedule's state
    assert again.scales == ensemble.scales
    again.close()
    ensemble.close()
    return found.rate


def test_auto_finds_the_rate_before_a_long_run():
    rates = hdet.in_process(found_before_the_run, 2)
    assert rates[0] == rates[1]
    assert 0.03 < rates[0] < 1.0


def test_the_search_does_not_depend_on_the_controller():
    def short():
        torch.manual_seed(0)
        model = hdet.data_parallel(nn.Linear(3, 1))
        o = optim.SGD(model.parameters(), lr=1e-3)
        ensemble = hdet.Ensemble(o, total_steps=200, interval=5, model=model)
        found = ensemble.find_lr([(X, Y)], loss_fn)
        assert o.param_groups[0]["lr"] == pytest.approx(found.rate)
        assert ensemble.found is found
        ensemble.close()
        return found.rate

    first, second = hdet.in_process(short, 2)
    assert first == second


def test_exploration_ends_with_the_active_part():
    def ended():
        seen = []
        _, _, ensemble, _ = made = make(
            controller=hdet.controllers.LineSearch(active=0.5), total_steps=40, interval="auto", on_round=[seen.append]
        )
        train(*made[:3], 40)
        explored = [record.step for record in seen if record.hyperparameters["learning_rate"].explored]
        assert [record.step for record in seen] == [5, 10, 15, 20, 25, 30, 35, 40]  # the schedule is told to its end
        return explored, ensemble.scales["learning_rate"], math.isfinite(ensemble.total_steps)

    steps, _, _ = hdet.in_process(ended, 2)[0]
    assert steps == [5, 10, 15, 20]


def not_searched(finds):
    model, o, ensemble, _ = make(
        controller=hdet.Auto(finds=finds), total_steps=5000, interval="auto", on_round=[kept.append]
    )
    train(model, o, ensemble, 12)
    ensemble.close()


kept = []


def test_auto_in_a_long_run_says_what_it_picked_and_warns_if_it_may_not_look():
    kept.clear()
    with pytest.warns(UserWarning, match=r"ensemble\.find_lr\(loader, loss_fn, scheduler=scheduler\)"):
        hdet.in_process(not_searched, 2, True)
    assert kept[0].step == 10
    assert kept[0].events[0].startswith("learning_rate: to be found before the first step")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hdet.in_process(not_searched, 2, False)


def observe_only():
    model, o, ensemble, _ = make(controller=hdet.Auto(), total_steps=5000, interval="auto", observe_only=True)

    def step(index):
        chosen = torch.randint(len(X), (8,), generator=torch.Generator().manual_seed(index))
        loss_fn(model, (X[chosen], Y[chosen])).backward()

    found = ensemble.find_lr(step)
    return found.rate, ensemble.scales["learning_rate"], o.param_groups[0]["lr"]


def test_what_is_only_observed_does_not_move_the_schedule():
    rate, scale, trained = hdet.in_process(observe_only, 2)[0]
    assert rate > 0.01
    assert (scale, trained) == (1.0, 1e-3)


def found_with_local_gradients(wrapped):
    torch.manual_seed(0)
    model = hdet.data_parallel(nn.Linear(3, 1)) if wrapped else nn.Linear(3, 1)
    o = optim.SGD(model.parameters(), lr=1e-3)
    ensemble = hdet.Ensemble(
        o, total_steps=5000, controller=hdet.Auto(), model=model, gradients="local",
        probe=hdet.Probe(Data(), loss_fn, size=16, chunk=4),
    )  # fmt: skip

    def step(index):
        g = torch.Generator().manual_seed(10 * index + ensemble.replicas.rank)
        chosen = torch.randint(len(X), (8,), generator=g)
        loss_fn(model, (X[chosen], Y[chosen])).backward()

    found = ensemble.find_lr(step)
    assert not model.require_backward_grad_sync
    return found.rate


def length_unknown(gradients):
    seen = []
    model, o, ensemble, probe = make(
        controller=hdet.Auto(finds=False),
        total_steps=None,
        interval="auto",
        gradients=gradients,
        on_round=[seen.append],
    )
    assert ensemble.interval == 10
    train(model, o, ensemble, 25)
    ensemble.finish()
    return [(record.step, record.probe) for record in seen], probe.samples


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_nothing_is_probed_where_nothing_is_explored(gradients):
    """Auto in a run of unknown length: a rate that was found is not fanned out, and local gradients need no probe."""
    seen = hdet.in_process(length_unknown, 2, gradients)[0]
    assert seen == ([(10, None), (20, None), (25, None)], 0)


def test_the_rate_is_found_with_shared_gradients_even_where_training_has_local_ones():
    rates = hdet.in_process(found_with_local_gradients, 2, True)
    assert rates[0] == rates[1]
    with pytest.raises(hdet.ReplicaError, match="wrap the model"):
        hdet.in_process(found_with_local_gradients, 2, False)


def test_a_probe_makes_auto_the_default_and_fixed_does_not_read_one():
    model = nn.Linear(3, 1)
    o = optim.SGD(model.parameters(), lr=1e-3)
    probe = hdet.Probe(Data(), loss_fn, size=16)
    assert isinstance(
        hdet.Ensemble(o, total_steps=50, model=model, probe=probe).engine.run.steering.controller, hdet.Auto
    )
    with pytest.warns(UserWarning, match="Fixed does not read it"):
        hdet.Ensemble(o, total_steps=50, model=model, probe=probe, controller=hdet.controllers.Fixed())
    with pytest.warns(UserWarning, match="do not lie on a line"):
        hdet.Ensemble(
            o, total_steps=50, model=model, probe=probe, gradients="local", controller=hdet.controllers.LineSearch()
        )


def from_zero():
    """A scalar that begins at zero, in the linear coordinate, judged by a probe whose best is at one."""
    model = nn.Linear(1, 1)
    o = optim.SGD(model.parameters(), lr=0.0)
    shift = hdet.scalar("shift", 0.0, coordinate="linear", bounds=(-5.0, 5.0), unit=1.0, spread=0.5)
    ensemble = hdet.Ensemble(
        o, [shift], total_steps=200, interval=1, controller=hdet.controllers.Slope(step_size=0.3), gradients="local",
        model=model, probe=lambda index: (shift.value - 1.0) ** 2,
    )  # fmt: skip
    for _ in range(199):
        model(torch.ones(1, 1)).sum().backward()
        o.step()
        ensemble.step(0.0)
    with ensemble.consensus():
        return shift.value


def test_a_scalar_can_start_from_zero():
    assert hdet.in_process(from_zero, 4)[0] == pytest.approx(1.0, abs=0.2)
