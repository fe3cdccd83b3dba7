"""The tail average: the mean of round ends against a float64 twin, what the probe decides, and what it leaves alone."""

import copy
import math
import statistics
import warnings

import pytest
import torch
import torch.distributed as dist
from processes import run
from torch import nn, optim

import hdet
from hdet._phases.tail_average import weights as tail
from hdet._phases.tail_average.phase import TailAverage
from hdet._run.tail_fit import unfit

STEPS, INTERVAL = 60, 3
FIRST = 30  # step after which round ends count, with a part of 1/2


def batch(step, replica=0):
    generator = torch.Generator().manual_seed(1000 * replica + step)
    x = torch.randn(16, 4, generator=generator)
    return x, x.sum(1, keepdim=True) + 3 * torch.randn(16, 1, generator=generator)


def loss_of(model, given):
    x, y = (t.to(next(model.parameters()).dtype) for t in given)
    return (model(x) - y).square().mean()


def a_probe():
    return hdet.Probe(lambda index: [batch(10**6 + 10 * index + k) for k in range(4)], loss_of)


def make(lr=0.3, spread=0.0, dtype=torch.float32, total_steps=STEPS, tail=0.5, followers=(), **options):
    torch.manual_seed(0)
    model = hdet.data_parallel(nn.Linear(4, 1).to(dtype))
    optimizer = optim.SGD(model.parameters(), lr=lr)
    told = []
    options = {"probe": a_probe(), "controller": hdet.controllers.LineSearch(), **options}
    ensemble = hdet.Ensemble(
        optimizer, [hdet.learning_rate(optimizer, spread=spread)], total_steps=total_steps, interval=INTERVAL,
        model=model, on_round=[told.append], averaging=hdet.Averaging(tail=tail, followers=followers), **options,
    )  # fmt: skip
    return model, optimizer, ensemble, told


def train(parts, steps=range(STEPS), after=None):
    model, optimizer, ensemble, _ = parts
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in steps:
        loss = loss_of(model, batch(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after(step + 1)
        ensemble.step(loss)
    return flat(model)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def plain(**options):
    """The last weights of the same run without an average, and those of all round ends that count, in float64."""
    ends = []
    parts = make(**{**options, "tail": 0})
    last = train(
        parts, after=lambda s: ends.append(flat(parts[0]).double()) if s > FIRST and s % INTERVAL == 0 else None
    )
    return last, torch.stack(ends)


def test_noise_is_averaged_out_half_of_the_way():
    """A high constant rate: the last weights jump about, their mean does not."""
    last, ends = plain()
    parts = make()
    found = train(parts)
    wanted = (last.double() + ends.mean(0)) / 2
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-7)
    assert not torch.equal(found, last)
    (told,) = [event for event in parts[3][-1].events if "tail" in event]
    assert told.startswith(
        "tail average: taken; half of the way to the mean of 10 round ends since step 33 (probe loss"
    )
    assert parts[3][-1].probe_seconds > 0
    assert hdet.records.make_schedule(parts[3])["tail_average_taken"] is True


def test_what_still_learns_is_left_bit_for_bit():
    last, _ = plain(lr=1e-3)
    parts = make(lr=1e-3)
    assert torch.equal(train(parts), last)
    (told,) = [event for event in parts[3][-1].events if "tail" in event]
    assert told.startswith("tail average: left, the last weights stay; half of the way")


def test_it_can_be_observed_only():
    last, _ = plain()
    parts = make(observe_only=True)
    assert torch.equal(train(parts), last)
    assert any(event.startswith("tail average: would be taken") for event in parts[3][-1].events)
    assert hdet.records.make_schedule(parts[3])["tail_average_taken"] is False


@pytest.mark.parametrize(
    ("last", "average", "better", "gain", "error"),
    [
        ([1.0, 1.0], [1.0, 1.0], False, 0.0, 0.0),
        ([1.0, 2.0, 3.0], [0.5, 1.5, 2.5], True, 0.5, 0.0),
        ([0.5, 1.5], [1.0, 2.0], False, -0.5, 0.0),
        ([1.0, 1.0, 1.0, 1.0], [0.8, 1.1, 0.8, 1.1], False, 0.05, math.sqrt(0.03 / 4)),
        ([1.0, 1.0, 1.0, 1.0], [0.8, 0.9, 0.8, 0.9], True, 0.15, math.sqrt(0.01 / 3 / 4)),
    ],
)
def test_the_comparison(last, average, better, gain, error):
    found = tail.compare(last, average)
    assert found.better == better
    assert found.loss == statistics.fmean(last)
    assert found.gain == pytest.approx(gain, abs=1e-12)
    assert found.error == pytest.approx(error, abs=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_losses_that_are_not_finite_leave_the_last_weights(bad):
    assert not tail.compare([1.0, bad], [0.1, 0.1]).better
    assert not tail.compare([1.0, 1.0], [0.1, bad]).better
    last, _ = plain()
    calls = []

    def probe(index):
        calls.append(index)
        return bad if len(calls) > 3 else 1.0

    parts = make(probe=probe)
    assert torch.equal(train(parts), last)
    assert any("is not finite" in event for event in parts[3][-1].events)


@pytest.mark.parametrize("huge", [[math.inf, -math.inf], [1.7e308, 1.7e308], [-1.7e308, 1.0]])
def test_huge_losses_are_no_evidence(huge):
    assert not tail.compare(huge, [1.0, 1.0]).better
    assert not tail.compare([1.0, 1.0], huge).better


def test_every_probe_is_a_fresh_one_and_scored_at_both():
    calls = []
    parts = make(probe=lambda index: calls.append((index, flat(parts[0]))) or 1.0)
    last = train(parts)
    rounds = STEPS // INTERVAL
    assert [index for index, _ in calls] == [rounds + k for k in range(16) for _ in range(2)]
    assert all(torch.equal(weights, last) for _, weights in calls[::2])
    assert all(torch.equal(weights, calls[1][1]) and not torch.equal(weights, last) for _, weights in calls[1::2])


def test_a_probe_that_fails_at_the_end_does_not_cost_the_run():
    last, _ = plain()
    batches = [[batch(k)] for k in range(STEPS // INTERVAL + 3)]
    parts = make(probe=hdet.Probe(lambda index: batches[index], loss_of))
    with pytest.warns(UserWarning, match="the probe raised IndexError at index 23"):
        assert torch.equal(train(parts), last)
    assert any("is not finite" in event for event in parts[3][-1].events)


def test_a_probe_that_raises_leaves_the_last_weights():
    last, _ = plain()
    calls = []

    def probe(index):
        calls.append(index)
        if len(calls) == 2:  # at the average
            raise KeyboardInterrupt
        return 1.0

    parts = make(probe=probe)
    with pytest.raises(KeyboardInterrupt):
        train(parts)
    assert torch.equal(flat(parts[0]), last)


@pytest.mark.parametrize("stop", [10, 31, 36, 44])
def test_resume_equals_uninterrupted(stop):
    whole = train(make())
    first = make()
    train(first, range(stop))
    saved = [part.state_dict() for part in first[:3]]
    assert ("tail average" in saved[2]["weights"]) == (stop >= 33)
    again = make()
    for part, state in zip(again[:3], saved, strict=True):
        part.load_state_dict(state)
    assert torch.equal(train(again, range(stop, STEPS)), whole)


def test_a_longer_run_forgets_what_came_too_early():
    """Its last part begins later: the uninterrupted longer run never counted these."""
    first = make()
    train(first, range(45))
    saved = [part.state_dict() for part in first[:3]]
    for part, mean_of in ((0.5, 0), (0.75, 5)):
        model, optimizer, again, _ = make(total_steps=80, tail=part)
        for one, state in zip((model, optimizer, again), saved, strict=True):
            one.load_state_dict(state)
        assert (
            again.engine.phase(TailAverage).tail.count == mean_of
        )  # since step 33; its part begins after step 40, and after 20


def test_no_round_end_counts_twice():
    parts = make()
    train(parts, range(45))
    parts[2].converge()
    parts[2].converge()
    assert parts[2].engine.phase(TailAverage).tail.count == 5
    saved = copy.deepcopy([part.state_dict() for part in parts[:3]])
    ends = []
    for again in (False, True):
        whole = make() if again else parts
        if again:
            for part, state in zip(whole[:3], saved, strict=True):
                part.load_state_dict(state)
        whole[2].finish()
        assert any("the mean of 5 round ends" in event for event in whole[3][-1].events)
        ends.append(flat(whole[0]))
    assert torch.equal(*ends)


class Shared(nn.Module):
    """Two parameters in one memory, and a buffer that holds all of it."""

    def __init__(self):
        super().__init__()
        self.flat = torch.zeros(5)
        self.weight, self.again = nn.Parameter(self.flat[:4].view(1, 4)), nn.Parameter(self.flat[:4].view(1, 4))
        self.bias = nn.Parameter(self.flat[4:])

    def forward(self, x):
        return nn.functional.linear(x, (self.weight + self.again) / 2, self.bias)


@pytest.mark.parametrize("lr", [1e-3, 0.3])
@pytest.mark.parametrize("follows", [False, True])
def test_what_shares_memory_is_swapped_once(lr, follows):
    """Each swap undoes the other: what is left is left bit for bit, what is taken is the twin's."""
    found = []
    for part in (0.0, 0.5):
        ends, model = [], Shared()
        optimizer = optim.SGD(model.parameters(), lr=lr)
        ensemble = hdet.Ensemble(
            optimizer, [hdet.learning_rate(optimizer, spread=0.0)], total_steps=STEPS, interval=INTERVAL, model=model,
            probe=a_probe(), controller=hdet.controllers.LineSearch(),
            averaging=hdet.Averaging(tail=part, followers=[model.flat] if follows else []),
        )  # fmt: skip
        train(
            (model, optimizer, ensemble, []),
            after=lambda s, m=model, e=ends: e.append(m.flat.double()) if s > FIRST and s % INTERVAL == 0 else None,
        )
        found.append(model.flat.clone())
    if lr < 0.1:
        assert torch.equal(*found)
    else:
        wanted = (ends[-1] + torch.stack(ends).mean(0)) / 2
        torch.testing.assert_close(found[1].double(), wanted, rtol=1e-6, atol=1e-7)


def test_a_scripted_part_is_no_hindrance():
    with pytest.deprecated_call():
        model = nn.Sequential(torch.jit.script(nn.Linear(4, 1)))
    assert unfit(a_probe(), model) is None


def test_memory_is_given_back():
    for end in (lambda parts: train(parts), lambda parts: (train(parts, range(45)), parts[2].close())):
        parts = make()
        end(parts)
        assert parts[2].engine.phase(TailAverage).tail.held == []


def test_an_end_before_the_last_part_says_so():
    parts = make()
    train(parts, range(20))
    parts[2].finish()
    assert parts[3][-1].events[-1] == "tail average: none, as 0 rounds have ended since step 30"


def test_a_state_of_another_layer_is_refused():
    def make_two(frozen):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
        model[frozen].requires_grad_(False)
        optimizer = optim.SGD(model.parameters(), lr=0.01)
        ensemble = hdet.Ensemble(
            optimizer, [hdet.learning_rate(optimizer, spread=0.0)], total_steps=STEPS, interval=INTERVAL, model=model,
            probe=a_probe(), averaging=hdet.Averaging(tail=0.5), controller=hdet.controllers.LineSearch(),
        )  # fmt: skip
        return model, optimizer, ensemble, []

    first = make_two(0)
    train(first, range(45))
    again = make_two(1)
    with pytest.raises(ValueError, match="the saved tail average belongs to another model, to other layers, or"):
        again[2].load_state_dict(first[2].state_dict())
    assert again[2].progress["step"] == 0, "nothing has changed"


def test_a_state_of_another_model_is_refused():
    first = make()
    train(first, range(45))
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    ensemble = hdet.Ensemble(
        optimizer, [hdet.learning_rate(optimizer, spread=0.0)], total_steps=STEPS, interval=INTERVAL, model=model,
        probe=a_probe(), averaging=hdet.Averaging(tail=0.5), controller=hdet.controllers.LineSearch(),
    )  # fmt: skip
    with pytest.raises(ValueError, match="the saved tail average belongs to another model"):
        ensemble.load_state_dict(first[2].state_dict())


def test_half_precision_is_averaged_in_single_precision_and_put_back_exactly():
    last, ends = plain(dtype=torch.bfloat16)
    found = train(make(dtype=torch.bfloat16))
    wanted = ((last.double() + ends.mean(0)) / 2).float().bfloat16()
    torch.testing.assert_close(found, wanted, rtol=2**-8, atol=0)
    last, _ = plain(dtype=torch.bfloat16, lr=1e-3)
    assert torch.equal(train(make(dtype=torch.bfloat16, lr=1e-3)), last)


def test_what_follows_the_weights_goes_along():
    last, _ = plain()
    double = torch.zeros(5)
    parts = make(followers=[double])
    found = train(parts, after=lambda step: double.copy_(2 * flat(parts[0])))
    torch.testing.assert_close(double, 2 * found)
    assert not torch.equal(found, last)


def test_other_layers_begin_anew():
    parts = make()
    train(parts, range(45))
    parts[0].bias.requires_grad_(False)
    mean = []
    found = train(parts, range(45, STEPS), lambda s: mean.append(flat(parts[0])) if s % INTERVAL == 0 else None)
    (told,) = [event for event in parts[3][-1].events if "tail" in event]
    assert "the mean of 5 round ends" in told
    assert ": taken" in told
    torch.testing.assert_close(found[:4], ((mean[-1] + torch.stack(mean).mean(0)) / 2)[:4])


def test_an_early_end_settles_it_too():
    parts = make()
    train(parts, range(50))
    before = flat(parts[0])
    parts[2].finish()
    assert parts[3][-1].last
    assert any("tail average" in event for event in parts[3][-1].events)
    assert any("tail average: taken" in event for event in parts[3][-1].events)
    assert not torch.equal(flat(parts[0]), before)
    after = flat(parts[0])
    parts[2].finish()
    assert torch.equal(flat(parts[0]), after)


def test_memory_is_there_from_the_first_step():
    parts = make()
    train(parts, range(1))
    assert [t.shape for t in parts[2].engine.phase(TailAverage).tail.held] == [p.shape for p in parts[0].parameters()]


class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tail": 1.5}, r"tail must lie in \[0, 1\], a part of the run"),
        ({"tail": math.nan}, "tail must lie in"),
        ({"total_steps": None}, "so the run's length must be known: write total_steps="),
        ({"probe": None, "controller": hdet.controllers.Fixed()}, r"it needs a probe.*probe=hdet.Probe\(...\)"),
        ({"model": None, "probe": lambda index: 1.0}, r"it needs to know the model \(model=model\)"),
        ({"model": Normed()}, "the running statistics of its normalisation"),
    ],
)
def test_what_cannot_be_averaged_is_refused(options, message):
    model = options.get("model") or nn.Linear(4, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    given = {"total_steps": 60, "probe": a_probe(), "model": model, "tail": 0.5, **options}
    with pytest.raises(ValueError, match=message):
        averaging = hdet.Averaging(tail=given.pop("tail"))
        hdet.Ensemble(optimizer, [hdet.learning_rate(optimizer, spread=0.0)], averaging=averaging, **given)


@pytest.mark.parametrize("statistics", [True, False])
def test_auto_wants_it_in_long_runs_and_says_so(statistics):
    model = Normed() if statistics else nn.Linear(4, 1)
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    told = []
    ensemble = hdet.Ensemble(
        optimizer, [hdet.learning_rate(optimizer)], total_steps=2000, model=model, probe=a_probe(),
        controller=hdet.Auto(finds=False), on_round=[told.append],
    )  # fmt: skip
    train((model, optimizer, ensemble, told), range(10))
    (event,) = [event for event in told[0].events if event.startswith("tail average")]
    if statistics:
        assert event.startswith("tail average: none: the running statistics")
    else:
        assert event.startswith("tail average: of the round ends in the last 50 % of the run; the probe compares it")
    assert ensemble.engine.phase(TailAverage).tail.active == (not statistics)
    ensemble.close()


def test_auto_leaves_a_spread_of_zero_plain():
    model = nn.Linear(4, 1)
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    rates = [hdet.learning_rate(optimizer, spread=0.0)]
    ensemble = hdet.Ensemble(optimizer, rates, total_steps=2000, model=model, probe=a_probe())
    assert not ensemble.engine.phase(TailAverage).tail.active
    assert "tail average" not in ensemble.engine.run.settings.plan.why


@pytest.mark.parametrize(("steps", "part"), [(1999, 0.0), (2000, 0.5), (None, 0.0)])
def test_auto_wants_it_from_2000_steps_on(steps, part):
    assert hdet.Auto().plan(["learning_rate"], steps).tail_average == part
    assert hdet.Auto(tail_average=0.0).plan(["learning_rate"], steps).tail_average == 0
    assert hdet.Auto().plan(["weight_decay"], steps).tail_average == 0


def test_fixed_may_have_a_probe_for_it():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = train(make(controller=hdet.controllers.Fixed()))
    assert torch.equal(found, train(make()))


def replicas(spread, gradients):
    """All replicas end with the same weights, those of the twin: half of the way to the mean of the round ends."""
    options = {"spread": spread, "gradients": gradients, "controller": hdet.controllers.Fixed()}
    ends, parts = [], make(**options, tail=0)
    for step in range(STEPS):
        last = train(parts, [step])
        if step + 1 > FIRST and (step + 1) % INTERVAL == 0:
            ends.append(last.double())
    parts = make(**options)
    found = train(parts)
    everyone = [torch.empty_like(found) for _ in range(2)]
    dist.all_gather(everyone, found)
    assert torch.equal(*everyone)
    assert any("tail average: taken" in event for event in parts[3][-1].events)
    torch.testing.assert_close(found.double(), (last.double() + torch.stack(ends).mean(0)) / 2, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("spread", "gradients"), [(0.0, "shared"), (0.3, "shared"), (0.0, "local"), (0.3, "local")])
def test_replicas_end_alike(spread, gradients):
    run(replicas, 2, spread, gradients)


def saves_and_resumes(path):
    whole = train(make(spread=0.3))
    for stop in (42, 43):  # at a round's end, and in mid-round
        first, again = make(spread=0.3), make(spread=0.3)
        train(first, range(stop))
        names = ("model", "optimizer", "ensemble")
        hdet.save(f"{path}/{stop}", dict(zip(names, first, strict=False)))
        hdet.load(f"{path}/{stop}", dict(zip(names, again, strict=False)))
        assert torch.equal(train(again, range(stop, STEPS)), whole)


def test_checkpoints_hold_it(tmp_path):
    run(saves_and_resumes, 2, str(tmp_path))


def uneven():
    """One replica's data end earlier: what it holds is not what the others do."""
    parts = make()
    with parts[2].join():
        train(parts, range(STEPS if dist.get_rank() == 0 else STEPS - 7))
    assert not parts[2].engine.phase(TailAverage).tail.active
    assert any("tail average: none, as data may end at different steps" in e for r in parts[3] for e in r.events)


def test_uneven_data_do_without():
    run(uneven, 2)


def test_a_rollback_begins_anew():
    """After the loss has run away, the mean holds nothing of it."""
    parts = make(safety=hdet.Safety(rollback=hdet.Rollback(window=4)), controller=hdet.controllers.Fixed())
    train(parts, range(40))
    with torch.no_grad():
        parts[0].weight.fill_(math.nan)
    train(parts, range(40, STEPS))
    (told,) = [event for record in parts[3][15:] for event in record.events if "tail" in event]
    assert "the mean of 7 round ends" in told  # of 10: the round of the alarm, which ended where it went back to, and 6
    assert flat(parts[0]).isfinite().all()
