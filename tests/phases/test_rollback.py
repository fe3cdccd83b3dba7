"""The alarm against its plain definition, and on curves that do and do not diverge."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from processes import run
from torch import nn, optim

import hdet
from hdet import Rollback
from hdet._engine.state import averaged_state
from hdet._phases.outer_step import TakeOuterStep
from hdet._phases.rollback.alarm import Alarm, check_most


def verdicts(losses, steps, alarm=None):
    """What the alarm says after each round."""
    alarm = alarm or Alarm()
    state, found = alarm.init(), []
    for loss in losses:
        state, verdict = alarm.update(state, float(loss), steps)
        found.append(verdict)
    return found


def plain_verdicts(losses, steps, window=100, every=100):
    """The same from the definitions, each time from the whole history."""
    found, began, saved = [], 0, None
    start = best = None
    error, bends = 0.0, []
    given, losses = losses, list(losses)  # as they came, and as they count
    for k, loss in enumerate(losses):
        since = (k - began + 1) * steps
        if not math.isfinite(loss):
            found.append("alarm")
            began, saved = k + 1, k
            continue

        def smooth(last, began=began):
            weights = [math.exp(-(last - i) * steps / window) for i in range(began, last + 1)]
            return np.average(losses[began : last + 1], weights=weights)

        first = smooth(min(k - 1, began + math.ceil(window / 10 / steps) - 1)) if k and start is None else start
        if first is not None:
            room = abs(first) if start is None else max((start - best) / 4, 8 * error)
            before = [smooth(k - 1) + room, given[k - 1]] if k > began else []
            losses[k] = min(loss, max([first + room, *before]))
        level, verdict = smooth(k), "ok"
        if start is None:
            lowest = all(level <= smooth(i) for i in range(began, k))
            if since >= window:
                start = smooth(began + math.ceil(window / 10 / steps) - 1)
                best, error, blocks_from = level, abs(start) / 32, k + 1
        else:
            size = math.ceil(window / 2 / steps)
            ended = max(began, blocks_from)
            ends = range(ended + size, k + 2, size)
            if len(ends) >= 3 and ends[-1] == k + 1:
                means = [np.mean(losses[end - size : end]) for end in ends[-3:]]
                bends.append((means[2] - 2 * means[1] + means[0]) ** 2 / 6)
            if since < window or k == began:
                found.append("ok")
                continue
            high, low = min(level, smooth(k - 1)), max(level, smooth(k - 1))
            lowest, best = low < best, min(low, best)
            if len(bends) >= 4 and low - best <= 8 * error:
                noise = np.average(bends, weights=np.exp(-np.arange(len(bends))[::-1] / 30))
                error = max(math.sqrt(noise) * (1 + 8 / len(bends)), 1e-6 * abs(means[-1]))
            gained = start - best
            if gained > 8 * error and high - best > max(gained / 2, 8 * error):
                verdict, began, saved = "alarm", k + 1, k
        if verdict == "ok" and lowest and (saved is None or (k - saved) * steps >= every):
            verdict, saved = "best", k
        found.append(verdict)
    return found


CURVES = {
    "power": lambda t, end: 0.5 + 2 * (1 + t / 50) ** -0.5,
    "exponential": lambda t, end: 3 * np.exp(-t / 300) + 0.05,
    "plateau": lambda t, end: 2.3 + 0 * t,
    "hardly falls": lambda t, end: 2.3 - 0.1 * t / end,
    "falls at once": lambda t, end: 1 + 9 * np.exp(-t / 5),
    "falls late": lambda t, end: 2.3 - 2 / (1 + np.exp(-20 * (t / end - 0.5))),
}


def losses(curve, steps, rounds, noise, seed, correlation=0.0):
    """Mean losses of rounds, with noise of that share of the loss in each step."""
    draw = np.random.default_rng(seed).standard_normal(rounds)
    for k in range(1, rounds if correlation else 0):
        draw[k] = correlation * draw[k - 1] + math.sqrt(1 - correlation**2) * draw[k]
    t = (np.arange(rounds) + 0.5) * steps
    return CURVES[curve](t, rounds * steps) * (1 + noise / math.sqrt(steps) * draw)


@pytest.mark.parametrize(("steps", "window"), [(1, 20), (5, 100), (7, 100), (100, 100), (1000, 100)])
def test_it_is_its_definition(steps, window):
    noisy = losses("power", steps, 200, 0.1, seed=0)
    noisy[90:95] *= 50
    noisy[120] = math.nan
    noisy[150:] += 10 * np.arange(50)
    found = verdicts(noisy, steps, Alarm(window, every=3 * steps))
    assert found == plain_verdicts(noisy, steps, window, every=3 * steps)
    assert found[0] == "best"
    assert found[120] == "alarm"
    assert {"ok", "best", "alarm"} == set(found)


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize(("steps", "rounds"), [(1, 1500), (5, 800), (20, 400), (100, 200), (1000, 100)])
def test_healthy_runs_raise_no_alarm(curve, steps, rounds):
    for noise in (0.0, 0.02, 0.3):
        for seed in range(10):
            correlation = 0.5 * (seed % 2)
            found = verdicts(losses(curve, steps, rounds, noise, seed, correlation), steps)
            assert "alarm" not in found, (noise, seed, found.index("alarm"))


@pytest.mark.parametrize("steps", [1, 5, 20, 35, 70, 100, 1000])
@pytest.mark.parametrize("where", [[1], [3], [150], [100, 150], [150, 152]])
def test_odd_rounds_raise_no_alarm(steps, where):
    """Nor do they blunt the alarm: what stays bad is noticed as soon as without them, or a round later."""
    for curve, noise, size in itertools.product(CURVES, (0.0, 0.1, 0.3), (1e4, 1e30)):
        odd = losses(curve, steps, 300, noise, seed=1)
        odd[where] = size
        assert "alarm" not in verdicts(odd, steps), (curve, noise, size)
    odd = losses("exponential", steps, 300, 0.1, seed=1)
    odd[where] = 1e30
    odd[250:] = 1e6
    assert verdicts(odd, steps).index("alarm") <= 250 + max(3, 100 // steps)


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize(("steps", "rounds"), [(1, 2500), (5, 500), (20, 200), (100, 60), (1000, 20)])
def test_divergence_is_noticed_in_time(steps, rounds, noise):
    healthy = losses("power", steps, rounds * 2, noise, seed=1)
    t = np.arange(1, rounds + 1) * steps
    rise = healthy[0] - healthy[rounds - 1]
    slack = 300 + 4 * steps  # three windows, and four rounds
    for name, bad, most in [
        ("jump", np.full(rounds, 1.5 * rise), 0),
        ("slow", rise * t / 1000, 1000),
        ("explodes", np.exp(np.minimum(t / 20, 200.0)) - 1, 0),
    ]:
        run = healthy.copy()
        run[rounds:] += bad
        found = verdicts(run, steps)
        assert found.index("alarm") >= rounds, name
        delay = (found.index("alarm") + 1 - rounds) * steps
        assert delay <= most + slack, f"{name} was noticed after {delay} steps"


@pytest.mark.parametrize("steps", [1, 5, 20, 50])
def test_early_divergence_is_noticed_too(steps):
    t = (np.arange(2000 // steps) + 0.5) * steps
    run = np.where(t < 200, 0.5 + 2 * np.exp(-t / 80), 2.3) * (1 + 0.1 / math.sqrt(steps) * np.sin(37 * t))
    assert 200 < (verdicts(run, steps).index("alarm") + 1) * steps <= 400


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_an_alarm_at_once(bad):
    for curve in CURVES:
        for rounds in (0, 1, 10, 300):
            found = verdicts([*losses(curve, 5, rounds, 0.1, 0), bad, bad], 5)
            assert found[rounds:] == ["alarm", "alarm"]
            assert "alarm" not in found[:rounds]


def test_rounding_is_no_signal():
    rounded = np.float32(2.3) + np.float32(3e-7) * np.random.default_rng(0).integers(-1, 2, 1000).astype(np.float32)
    rounded[: 1000 // 3] += np.float32(1e-6)
    assert "alarm" not in verdicts(rounded, 5)


def test_a_run_that_never_fell_has_nothing_to_give_back():
    climbing = 2.3 + 0.01 * np.arange(1000)
    assert set(verdicts(climbing, 5)) == {"ok", "best"}
    assert verdicts(climbing, 5).count("best") == 1, "the first round's: the best there is"


def test_a_bad_round_in_the_first_window_does_not_blunt_the_alarm():
    run = losses("power", 5, 300, 0.1, 0)
    run[5] = 20.0
    run[200:] += 5
    found = verdicts(run, 5)
    assert 200 < found.index("alarm") < 240


@pytest.mark.parametrize("steps", [10, 40, 50, 100])
def test_the_start_is_that_of_the_first_steps_however_long_a_round_is(steps):
    """Half learned within 20 steps, then higher with the rising rate of a warm-up: what long rounds once gave back."""
    losses = [0.3 + 2.0 * math.exp(-k / 10) + 0.5 * min(max(k - 500, 0) / 500, 1) for k in range(2000)]
    alarm = Alarm()
    state, found = alarm.init(), []
    for k in range(0, len(losses), steps):
        part = losses[k : k + steps]
        state, verdict = alarm.update(state, sum(part) / steps, steps, sum(part[: alarm.early]) / alarm.early)
        found.append(verdict)
    assert state["start"] == pytest.approx(sum(losses[:10]) / 10)
    assert "alarm" not in found
    while found[-1] != "alarm":  # and if it gives back all of it there is one
        state, verdict = alarm.update(state, 2.3, steps)
        found.append(verdict)
        assert len(found) < 2000 // steps + 2 + 300 // steps


def long_rounds(interval, batches=1, resumed=None):
    """What the alarm of an ensemble takes for its start, and the losses of the steps of each replica."""
    p = nn.Parameter(torch.zeros(1))
    o = optim.SGD([p], lr=0.1)

    def make(**options):
        rate = hdet.learning_rate(o, spread=0.1)
        return hdet.Ensemble(
            o, [rate], total_steps=200, interval=interval, safety=hdet.Safety(rollback=hdet.Rollback(**options))
        )

    ensemble, given = make(), []
    for step in range(120):
        given.append(3.0 + ensemble.replicas.rank - 0.02 * step)
        for number in range(batches):
            if number == batches - 1:
                p.grad = torch.ones(1)
                o.step()
            ensemble.step(given[-1] + number - (batches - 1) / 2)
        if step == 25 and resumed is not None:  # in mid-round
            state = ensemble.state_dict()
            ensemble.close()
            ensemble = make(window=200 if resumed == "another window" else 100)
            ensemble.load_state_dict(averaged_state(state) if resumed == "averaged" else state)
    start = ensemble.state_dict()["phases"]["rollback"]["alarm"]["start"]
    ensemble.close()
    return start, given


@pytest.mark.parametrize(
    ("interval", "batches", "resumed"),
    [
        (10, 1, None), (40, 1, None), (40, 4, None), (10, 16, None), (100, 1, "the same"), (40, 1, "another window"),
        (40, 4, "averaged"),
    ],
)  # fmt: skip
def test_an_ensemble_tells_its_alarm_of_the_first_steps(interval, batches, resumed):
    found = hdet.in_process(long_rounds, 2, interval, batches, resumed)
    expected = sum(sum(given[:10]) / 10 for _, given in found) / 2
    assert [start for start, _ in found] == [pytest.approx(expected)] * 2


def test_an_alarm_begins_anew():
    alarm = Alarm()
    run = losses("power", 5, 400, 0.1, 0)
    state = alarm.init()
    for loss in run:
        state, _ = alarm.update(state, loss, 5)
    best = state["best"]
    kept = dict(state)
    again, verdict = alarm.update(state, math.inf, 5)
    assert (verdict, again["alarms"], again["best"], again["steps"]) == ("alarm", 1.0, best, 0.0)
    assert state == kept, "the state that was given is left as it is"
    found = []
    for loss in np.full(60, 5.0):  # as bad as before: no alarm until a window is full
        again, verdict = alarm.update(again, loss, 5)
        found.append(verdict)
    assert found.index("alarm") == 19
    assert again["alarms"] == 4.0
    for loss in run[-100:]:
        again, verdict = alarm.update(again, loss, 5)
        assert verdict != "alarm"


def test_snapshots_are_not_taken_too_often():
    falling = 10 - 0.001 * np.arange(1000)
    for every in (50, 100, 333):
        bests = [k for k, verdict in enumerate(verdicts(falling, 5, Alarm(every=every))) if verdict == "best"]
        assert bests[0] == 0
        assert 5 * min(np.diff(bests)) >= every
        assert len(bests) >= 5000 / (every + 5) - 3


def test_the_state_is_plain_floats():
    alarm = Alarm()
    state = alarm.init()
    for loss in losses("power", 5, 100, 0.1, 0):
        state, _ = alarm.update(state, float(loss), 5)
        assert all(type(value) is float and math.isfinite(value) for value in state.values())
    assert json.loads(json.dumps(state)) == state


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be at least 1 optimizer steps, got 0"),
        ({"cut": 1.0}, "cut must lie between 0 and 1, got 1.0; write for example 0.25"),
        ({"cut": 0.0}, "cut must lie between 0 and 1"),
        ({"most": 0}, "most must be at least 1"),
        ({"every": -3}, "every must be at least 1"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        Rollback(**options)


@pytest.mark.parametrize("options", [{"window": 1.5}, {"cut": "half"}, {"most": None}, {"every": True}])
def test_options_that_are_no_numbers(options):
    with pytest.raises(TypeError, match="must be"):
        Rollback(**options)


def test_too_many_rollbacks_are_an_error():
    rollback, alarm = Rollback(most=2), Alarm()
    assert (rollback.window, rollback.every) == (alarm.window, alarm.every) == (100, 100)
    state = alarm.init()
    for count in range(3):
        state, verdict = alarm.update(state, math.nan, 5)
        assert verdict == "alarm"
        if count < 2:
            check_most(rollback, state, step=77)
    with pytest.raises(RuntimeError, match=r"diverged again at step 77, after 2 rollbacks.*Rollback\(most=4\)"):
        check_most(rollback, state, step=77)


# In the ensemble


def diverging(spread, gradients):
    """A burst of a rate 1e4 times too high: without rollback the loss is infinite, with it the run goes on."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    model = net if gradients == "local" else hdet.data_parallel(net)
    o = optim.Adam(model.parameters(), lr=1e-2)
    events = []
    ensemble = hdet.Ensemble(
        o, [hdet.learning_rate(o, spread=spread)], total_steps=400, interval=5, model=model, gradients=gradients,
        safety=hdet.Safety(rollback=hdet.Rollback(window=20, every=20)), on_round=[lambda r: events.extend(r.events)],
    )  # fmt: skip
    losses = []
    for step in range(400):
        x = torch.randn(16, 3, generator=torch.Generator().manual_seed(10 * step + ensemble.replicas.rank))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        if 200 <= step < 203:
            for p in model.parameters():
                p.grad.fill_(math.inf)
        o.step()
        o.zero_grad()
        ensemble.step(loss)
        losses.append(loss.item())
    ensemble.close()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return (
        events,
        ensemble.state_dict()["phases"]["control"]["controller"]["learning_rate"]["scale"],
        losses[-1],
        weights,
    )


@pytest.mark.parametrize(("spread", "gradients"), [(0.0, "shared"), (0.3, "shared"), (0.3, "local")])
def test_a_run_that_breaks_goes_on_from_its_best_weights(spread, gradients):
    first, second = hdet.in_process(diverging, 2, spread, gradients)
    events, scale, loss, weights = first
    assert len(events) == 1
    assert "rolled back at step 20" in events[0]
    assert scale == 0.25
    assert loss < 0.5
    assert torch.equal(weights, second[3])
    assert (events, scale) == second[:2]


def test_rollback_on_real_processes():
    first, second = run(diverging, 2, 0.3, "shared")
    assert first[0] == second[0]
    assert len(first[0]) == 1
    assert torch.equal(first[3], second[3])


def test_without_losses_it_is_refused():
    model = nn.Linear(2, 1)
    o = optim.SGD(model.parameters(), lr=0.1)
    ensemble = hdet.Ensemble(o, total_steps=10, safety=hdet.Safety(rollback=hdet.Rollback()))
    model(torch.ones(1, 2)).sum().backward()
    o.step()
    with pytest.raises(ValueError, match="Rollback judges by the losses"):
        ensemble.step()
    with pytest.raises(TypeError, match=r"rollback=hdet\.Rollback\(\)"):
        hdet.Ensemble(o, total_steps=10, safety=hdet.Safety(rollback=3))


def test_there_is_always_a_learning_rate_to_cut():
    model = nn.Linear(2, 1)
    o = optim.AdamW(model.parameters(), lr=0.1)
    ensemble = hdet.Ensemble(o, [hdet.momentum(o)], total_steps=10, safety=hdet.Safety(rollback=hdet.Rollback()))
    assert "learning_rate" in ensemble.scales


def test_a_rollback_changes_nothing_of_what_auto_picks():
    model = nn.Linear(2, 1)
    o = optim.AdamW(model.parameters(), lr=0.1)
    probe = hdet.Probe(lambda index: [], lambda model, batch: 0.0, held_out=True)
    options = {"total_steps": 8000, "controller": hdet.Auto(), "probe": probe, "model": model}
    plain = hdet.Ensemble(o, [hdet.weight_decay(o)], **options)
    plain.close()
    guarded = hdet.Ensemble(o, [hdet.weight_decay(o)], safety=hdet.Safety(rollback=hdet.Rollback()), **options)
    assert (guarded.interval, guarded.design, guarded.engine.phase(TakeOuterStep).outer.amount) == (
        plain.interval,
        plain.design,
        1.0,
    )


def odd_moments():
    """converge() before the round's first loss, a layer that is unfrozen, and a value in a buffer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    net.register_buffer("heat", torch.tensor(1.0))
    net[0].requires_grad_(False)
    o = optim.Adam(net.parameters(), lr=1e-2)
    events, scales = [], []
    ensemble = hdet.Ensemble(
        o, [hdet.learning_rate(o, spread=0.1), hdet.attribute(net, "heat", spread=0.3)], total_steps=100, interval=4,
        model=net, gradients="local", safety=hdet.Safety(rollback=hdet.Rollback()),
        on_round=[lambda r: (events.extend(r.events), scales.append(r.hyperparameters["learning_rate"].scale))],
    )  # fmt: skip
    for step in range(40):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        loss = (net(x) * net.heat - x.sum(1, keepdim=True)).square().mean()
        loss = loss * math.nan if step == 30 else loss
        loss.backward()
        o.step()
        o.zero_grad()
        if step == 9:
            ensemble.converge()
        ensemble.step(loss)
        if step == 20:
            net[0].requires_grad_(True)
    ensemble.close()
    return events, scales, net.heat.item()


def test_odd_moments_are_no_false_alarms_and_real_ones_are_caught():
    first, second = hdet.in_process(odd_moments, 2)
    assert first == second
    events, scales, heat = first
    assert len(events) == 1
    assert "to the weights of step 2" in events[0]
    assert set(scales) == {1.0, 0.25}
    assert scales.index(0.25) == next(k for k, s in enumerate(scales) if s != 1.0)
    assert heat == 1.0


CONTROLLERS = {
    "fixed": hdet.controllers.Fixed(),
    "softmax": hdet.controllers.Softmax(temperature=0.1),
    "slope": hdet.controllers.Slope(),
    "line search": hdet.controllers.LineSearch(),
    "auto": hdet.Auto(),
}


def controller_state(ensemble):
    return ensemble.state_dict()["phases"]["control"]["controller"]


def under(controller):
    """A run whose weights blow up in the fifth round; the events, and what the controller remembers right after."""
    rank = hdet.find_replicas().rank
    torch.manual_seed(0)
    model = hdet.data_parallel(nn.Linear(3, 1))
    o = optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    events = []
    ensemble = hdet.Ensemble(
        o, [hdet.learning_rate(o, spread=0.3)], total_steps=80, interval=4, model=model, controller=controller,
        probe=hdet.Probe(x, lambda model, x: (model(x) - x.sum(1, keepdim=True)).square().mean(), held_out=True),
        safety=hdet.Safety(rollback=hdet.Rollback()),
        on_round=[lambda record: events.extend((e, controller_state(ensemble)) for e in record.events)],
    )  # fmt: skip
    for step in range(40):
        batch = torch.randn(8, 3, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss = loss * math.inf if step == 18 else loss
        loss.backward()
        o.step()
        o.zero_grad()
        ensemble.step(loss)
    ensemble.finish()
    back = [memory for event, memory in events if "rolled back" in event]
    return back, [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("name", CONTROLLERS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_controller_goes_back_and_forgets(name):
    first, second = hdet.in_process(lambda: under(CONTROLLERS[name]), 2)
    assert first == second
    (memory,), weights = first
    fresh = CONTROLLERS[name].init(["learning_rate"])["learning_rate"]
    assert {**memory["learning_rate"], "scale": 1.0} == fresh, "the controller still remembers what led there"
    assert all(math.isfinite(x) for row in weights for x in torch.tensor(row).flatten().tolist())


def with_odd_losses(controller, odd, everywhere):
    """A run in which replica 1, or every replica, is given these losses at these steps; events, and the last scale."""
    rank = hdet.find_replicas().rank
    torch.manual_seed(0)
    model = hdet.data_parallel(nn.Linear(3, 1))
    o = optim.SGD(model.parameters(), lr=1e-2)
    events, scales = [], []
    ensemble = hdet.Ensemble(
        o, [hdet.learning_rate(o, spread=0.3)], total_steps=400, interval=5, model=model, controller=controller,
        safety=hdet.Safety(rollback=hdet.Rollback()),
        on_round=[lambda r: (events.extend(r.events), scales.append(r.hyperparameters["learning_rate"].scale))],
    )  # fmt: skip
    for step in range(400):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        o.step()
        o.zero_grad()
        ensemble.step(odd.get(step, loss) if everywhere or rank == 1 else loss)
    ensemble.close()
    return [event for event in events if "rolled back" in event], scales[-1]


ODD = [({200: 1e30}, False), ({200: 1e30, 230: 1e30}, True), ({3: 1e30}, False), ({200: 1e4, 203: 1e4}, False)]


@pytest.mark.parametrize(
    ("name", "odd", "everywhere"),
    [*(("fixed", *odd) for odd in ODD), ("softmax", *ODD[0]), ("slope", *ODD[0])],
)
def test_an_odd_loss_takes_nothing_back(name, odd, everywhere):
    (events, scale), *others = hdet.in_process(lambda: with_odd_losses(CONTROLLERS[name], odd, everywhere), 4)
    assert all(other == (events, scale) for other in others)
    assert events == []
    if name != "fixed":
        _, usual = hdet.in_process(lambda: with_odd_losses(CONTROLLERS[name], {}, True), 4)[0]
        assert scale == pytest.approx(usual, rel=0.25)


@pytest.mark.parametrize("odd", [-1e30, -1e6, -3.4e38])
@pytest.mark.parametrize("at", [4, 30])
def test_one_odd_loss_that_is_far_too_low_is_no_best_to_go_back_to(odd, at):
    """Every loss after it would seem to have given back nearly all that was gained, until the run is given up."""
    alarm, state, verdicts = Alarm(), Alarm().init(), []
    for number in range(120):
        loss = 1 + 4 * math.exp(-number / 6) + 0.02 * math.sin(7 * number)
        state, verdict = alarm.update(state, odd if number == at else loss, 10)
        verdicts.append(verdict)
    assert "alarm" not in verdicts
    for number in range(20):  # and a run that is lost is noticed
        state, verdict = alarm.update(state, 1 + 0.5 * number, 10)
        verdicts.append(verdict)
    assert "alarm" in verdicts


def test_a_loss_that_falls_far_below_0_is_believed_in_its_second_round():
    alarm, state = Alarm(), Alarm().init()
    for number in range(60):
        state, _ = alarm.update(state, 5.0 if number < 30 else -500.0, 10)
    assert state["best"] < -400
