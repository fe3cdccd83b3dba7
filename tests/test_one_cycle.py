"""The drop-in keeps the whole contract of torch's OneCycleLR."""

import copy
import gc
import inspect
import itertools
import math
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import initialise_gloo, run
from single import pretended
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet import OneCycleAutoLR
from hdet._phases.scores import Scores


def optimizer(kind=optim.AdamW, groups=2, lr=0.1):
    return kind([{"params": [nn.Parameter(torch.ones(2))]} for _ in range(groups)], lr=lr)


def take(scheduler, *args, **kwargs):
    for group in scheduler.optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    scheduler.optimizer.step()
    scheduler.step(*args, **kwargs)


def test_the_published_signature():
    published = {
        "auto_lr_warmup_steps": 100000,
        "ensemble_lr_spread_ratio": 0.0,
        "model_sync_interval": 1000,
        "rank": 0,
        "world_size": 1,
        "enable_auto_lr": False,
        "loss_scale": 0.002,
        "lr_of_lr": 0.5,
        "momentum_of_lr": 0.9,
    }
    ours = inspect.signature(OneCycleAutoLR).parameters
    theirs = inspect.signature(OneCycleLR).parameters
    positional = [p for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == [*theirs, *published]
    assert {name: ours[name].default for name in published} == published
    assert all(ours[name].default == p.default for name, p in theirs.items())
    assert issubclass(OneCycleAutoLR, OneCycleLR)


@pytest.mark.parametrize(
    "options",
    [
        {"total_steps": 40},
        {"epochs": 4, "steps_per_epoch": 10},
        {"total_steps": 40, "three_phase": True, "pct_start": 0.25},
        {"total_steps": 40, "anneal_strategy": "linear", "final_div_factor": 7.0},
        {"total_steps": 40, "cycle_momentum": False},
        {"total_steps": 40, "base_momentum": [0.7, 0.8], "max_momentum": [0.9, 0.95]},
    ],
)
@pytest.mark.parametrize("kind", [optim.AdamW, lambda p, lr: optim.SGD(p, lr, momentum=0.9)])
def test_with_spread_zero_it_is_one_cycle(options, kind):
    plain = OneCycleLR(optimizer(kind), [0.1, 0.3], **options)
    ours = OneCycleAutoLR(optimizer(kind), [0.1, 0.3], **options)
    assert ours.get_last_lr() == plain.get_last_lr()
    for _ in range(40):
        take(plain)
        take(ours)
        assert ours.get_last_lr() == plain.get_last_lr() == ours.get_replica_lr()
        for a, b in zip(plain.optimizer.param_groups, ours.optimizer.param_groups, strict=True):
            assert {k: v for k, v in a.items() if k != "params"} == {k: v for k, v in b.items() if k != "params"}
            assert all(torch.equal(x, y) for x, y in zip(a["params"], b["params"], strict=True))
    for scheduler in (plain, ours):
        with pytest.raises(ValueError, match="Tried to step 41 times"):
            take(scheduler)


@pytest.mark.parametrize("decay", ["one_cycle", "geometric"])
@pytest.mark.parametrize("anneal", ["cos", "linear"])
def test_equal_losses_leave_the_center_on_its_curve(decay, anneal):
    results = run(equal_losses, 2, decay, anneal)
    assert results[0] == results[1]


def equal_losses(decay, anneal):
    steps, interval, warmup = 60, 7, 20
    ours = OneCycleAutoLR(
        optimizer(), 0.1, total_steps=steps, anneal_strategy=anneal, ensemble_lr_spread_ratio=0.3,
        model_sync_interval=interval, auto_lr_warmup_steps=warmup, enable_auto_lr=True, decay=decay,
    )  # fmt: skip
    plain = OneCycleLR(optimizer(), 0.1, total_steps=steps, anneal_strategy=anneal)
    floor = plain.optimizer.param_groups[0]["min_lr"]
    centers = []
    for step in range(1, steps + 1):
        take(ours, torch.tensor(2.5))
        take(plain)
        centers.append(ours.get_last_lr())
        if decay == "one_cycle" or step < 21:
            assert ours.get_last_lr() == plain.get_last_lr()
    if decay == "geometric":
        converges = [21, 28, 35, 42, 49, 56, 60]
        start = OneCycleLR(optimizer(), 0.1, total_steps=steps, anneal_strategy=anneal)
        for _ in range(21):
            take(start)
        gamma = 1 - (floor / start.get_last_lr()[0]) ** (1 / len(converges))
        for k, at in enumerate(converges, start=1):
            assert centers[at - 1][0] == pytest.approx(start.get_last_lr()[0] * (1 - gamma) ** k, rel=1e-9)
            until = converges[k] if k < len(converges) else steps
            assert all(c == centers[at - 1] for c in centers[at - 1 : until - 1])
        assert centers[-1][0] == floor
    else:
        assert centers[-2][0] == pytest.approx(floor, rel=1e-9)
    return centers


@pytest.mark.parametrize("decay", ["one_cycle", "geometric"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_one_sided_signal_to_the_last_step(decay, sign):
    for centers, curve, floor in run(one_sided, 2, decay, sign):
        assert all(math.isfinite(c) and c >= floor * (1 - 1e-12) for c in centers)
        assert all(c <= 10 * f * (1 + 1e-12) for c, f in zip(centers, curve, strict=True))
        active = centers[120:-1]
        if sign < 0:
            assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(active))
            assert active[-1] == pytest.approx(floor, rel=0.2 if decay == "geometric" else 1e-9)
        else:
            assert all(c >= f * (1 - 1e-12) for c, f in zip(centers, curve, strict=True))
            assert active[-1] > 2 * curve[-2]


def one_sided(decay, sign):
    steps = 400
    ours = OneCycleAutoLR(
        optimizer(groups=1), 0.1, total_steps=steps, ensemble_lr_spread_ratio=0.5, model_sync_interval=2,
        auto_lr_warmup_steps=120, enable_auto_lr=True, decay=decay,
    )  # fmt: skip
    centers, curve = [], []
    for _ in range(steps):
        # whoever has the higher rate (sign 1) or the lower (sign -1) always wins
        take(ours, 1.0 - sign * (ours.get_replica_lr()[0] / ours.get_last_lr()[0]))
        centers.append(ours.get_last_lr()[0])
        curve.append(ours.optimizer.param_groups[0]["lr"])
    return centers, curve, ours.optimizer.param_groups[0]["min_lr"]


@pytest.mark.parametrize(
    "loss",
    [torch.tensor(1.0), torch.tensor([1.0]), torch.tensor(1.0, dtype=torch.bfloat16), 1.0, np.float32(1.0)],
)
@pytest.mark.parametrize("keyword", [False, True])
def test_ways_to_pass_a_loss(loss, keyword):
    with pretended():
        s = OneCycleAutoLR(optimizer(), 0.1, total_steps=9, ensemble_lr_spread_ratio=0.1, enable_auto_lr=True,
                           auto_lr_warmup_steps=3, model_sync_interval=9)  # fmt: skip
        if keyword:
            take(s, loss=loss)
        else:
            take(s, loss)
        assert s.last_epoch == 1
        assert s.ensemble.engine.phase(Scores).score.mean(torch.device("cpu")).item() == 1.0


def test_an_int_is_an_epoch():
    s = OneCycleAutoLR(optimizer(), 0.1, total_steps=20)
    with pytest.warns(UserWarning, match="EPOCH|epoch"):
        take(s, 7)
    assert s.last_epoch == 7
    plain = OneCycleLR(optimizer(), 0.1, total_steps=20)
    for _ in range(7):
        take(plain)
    assert s.get_last_lr() == plain.get_last_lr()


@pytest.mark.parametrize(
    ("loss", "error"),
    [(torch.zeros(2), ValueError), ({"loss": 1.0}, TypeError), (1j, TypeError), (torch.tensor(1j), TypeError)],
)
def test_a_bad_loss_leaves_the_schedule_where_it_was(loss, error):
    s = OneCycleAutoLR(optimizer(), 0.1, total_steps=20)
    before = s.get_last_lr()
    with pytest.raises(error, match="loss must"):
        take(s, loss)
    assert (s.last_epoch, s.get_last_lr()) == (0, before)
    with pytest.raises(TypeError, match="twice"):
        take(s, 1.0, loss=1.0)


def test_a_missing_loss_is_an_error_only_when_the_losses_move_the_rates():
    options = {"total_steps": 20, "ensemble_lr_spread_ratio": 0.1, "model_sync_interval": 20}
    with pretended():
        take(OneCycleAutoLR(optimizer(), 0.1, **options))
        s = OneCycleAutoLR(optimizer(), 0.1, **options, enable_auto_lr=True, auto_lr_warmup_steps=5)
        with pytest.raises(ValueError, match=r"losses, but none was given; .* step\(loss\)"):
            take(s)


def test_the_order_warning_of_torch():
    s = OneCycleAutoLR(optimizer(), 0.1, total_steps=20)
    with pytest.warns(UserWarning, match=r"before `optimizer.step\(\)`"):
        s.step()


@pytest.mark.parametrize("auto", [False, True])
def test_no_reference_cycle(auto):
    gc.collect()
    gc.disable()
    try:
        o = optimizer()
        s = OneCycleAutoLR(o, 0.1, total_steps=20, ensemble_lr_spread_ratio=0.1, enable_auto_lr=auto,
                           auto_lr_warmup_steps=5, model_sync_interval=20)  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            take(s, 1.0)
            del s, o
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        ours = [x for x in gc.garbage if type(x).__module__.split(".")[0] == "hdet" or isinstance(x, optim.Optimizer)]
        assert ours == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_resume_with_last_epoch():
    first = OneCycleAutoLR(optimizer(), 0.1, total_steps=20, model_sync_interval=4)
    for _ in range(10):
        take(first)
    o = optimizer()
    o.load_state_dict(first.optimizer.state_dict())
    second = OneCycleAutoLR(o, 0.1, total_steps=20, model_sync_interval=4, last_epoch=9)
    assert second.last_epoch == 10
    assert second.ensemble.state_dict()["progress"]["step"] == 10
    for _ in range(10):
        take(first)
        take(second)
        assert first.get_last_lr() == second.get_last_lr()


def test_state_of_torchs_one_cycle_can_be_loaded():
    plain = OneCycleLR(optimizer(), 0.1, total_steps=20)
    for _ in range(7):
        take(plain)
    ours = OneCycleAutoLR(optimizer(), 0.1, total_steps=20, model_sync_interval=4)
    ours.optimizer.load_state_dict(plain.optimizer.state_dict())
    ours.load_state_dict(plain.state_dict())
    assert ours.ensemble.state_dict()["progress"] == {
        "step": 7, "round": 1, "step_in_round": 3, "cut": True, "noisy": False, "finished": False,
    }  # fmt: skip
    take(plain)
    take(ours)
    assert ours.get_last_lr() == plain.get_last_lr()


def test_the_state_holds_no_rank_and_loads_with_weights_only(tmp_path):
    with pretended(1, 2):
        s = OneCycleAutoLR(optimizer(), 0.1, total_steps=20, ensemble_lr_spread_ratio=0.1, enable_auto_lr=True,
                           auto_lr_warmup_steps=5, model_sync_interval=4, world_size=2, rank=1)  # fmt: skip
        state = s.state_dict()
        assert not {"rank", "world_size", "_world_size"} & set(state)
        assert "mid_round" not in state["ensemble"]
        take(s, torch.tensor(2.0))
        state = s.state_dict()
        torch.save({"scheduler": state, "optimizer": s.optimizer.state_dict()}, tmp_path / "state.pt")
        loaded = torch.load(tmp_path / "state.pt", weights_only=True)
        assert loaded["scheduler"]["ensemble"] == state["ensemble"]
        s.load_state_dict(loaded["scheduler"])


def late_initialisation():
    s = OneCycleAutoLR(optimizer(), 0.1, total_steps=20, ensemble_lr_spread_ratio=0.5, model_sync_interval=4,
                       world_size=2)  # fmt: skip
    assert s.get_replica_lr() == s.get_last_lr()
    initialise_gloo()
    return s.get_replica_lr()[0] / s.get_last_lr()[0]


def test_rank_and_world_size_come_from_torch_distributed_even_when_it_comes_later():
    assert sorted(run(late_initialisation, 2, initialise=False)) == pytest.approx([0.5, 1.5])


def test_a_world_size_without_torch_distributed_is_an_error():
    s = OneCycleAutoLR(optimizer(), 0.1, total_steps=20, ensemble_lr_spread_ratio=0.5, model_sync_interval=4,
                       world_size=4)  # fmt: skip
    with pytest.warns(UserWarning, match="only one replica"), pytest.raises(RuntimeError, match="init_process_group"):
        take(s)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"enable_auto_lr": True}, "no effect with ensemble_lr_spread_ratio=0"),
        (
            {"enable_auto_lr": True, "ensemble_lr_spread_ratio": 0.1},
            "auto_lr_warmup_steps=100000 is not over at step 16",
        ),
        (
            {
                "enable_auto_lr": True,
                "ensemble_lr_spread_ratio": 0.1,
                "model_sync_interval": 20,
                "auto_lr_warmup_steps": 0,
            },
            "is not over at step 0",
        ),
        ({"decay": "geometric"}, "no effect without enable_auto_lr"),
        ({"ensemble_lr_spread_ratio": 0.1, "model_sync_interval": 1000}, "longer than the run of 20"),
    ],
)
def test_arguments_without_effect_warn(options, match):
    with pytest.warns(UserWarning, match=match):
        OneCycleAutoLR(optimizer(), 0.1, total_steps=20, **{"model_sync_interval": 4, **options})


def test_a_warm_up_that_never_ends_is_told_once_with_the_published_names():
    given = {"enable_auto_lr": True, "ensemble_lr_spread_ratio": 0.1, "model_sync_interval": 4}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        OneCycleAutoLR(optimizer(), 0.1, total_steps=20, **given)
    assert [str(w.message)[:30] for w in said if "acts" in str(w.message) or "effect" in str(w.message)] == [
        "enable_auto_lr has no effect: "
    ]
    with pytest.warns(UserWarning, match="Softmax never acts"):  # an ensemble that is made by hand says so itself
        o = optimizer()
        hdet.Ensemble(
            o, [hdet.learning_rate(o)], total_steps=9, controller=hdet.controllers.Softmax(warmup_steps=9), interval=3
        )


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"ensemble_lr_spread_ratio": 1.0}, ValueError, r"ensemble_lr_spread_ratio must lie in \[0, 1\).* got 1.0"),
        ({"ensemble_lr_spread_ratio": -0.1}, ValueError, "ensemble_lr_spread_ratio"),
        ({"ensemble_lr_spread_ratio": math.nan}, ValueError, "ensemble_lr_spread_ratio.*nan"),
        ({"ensemble_lr_spread_ratio": "wide"}, TypeError, "ensemble_lr_spread_ratio"),
        ({"model_sync_interval": 0}, ValueError, "model_sync_interval must be at least 1"),
        ({"model_sync_interval": 2.5}, TypeError, "model_sync_interval must be an int"),
        ({"max_lr": [0.1]}, ValueError, "max_lr must be one number, or one for each of the 2.* got 1"),
        ({"max_lr": -0.1}, ValueError, "max_lr must"),
        ({"max_lr": math.nan}, ValueError, "max_lr must.*nan"),
        ({"max_lr": [0.1, math.inf]}, ValueError, "max_lr must"),
        ({"max_lr": "0.1"}, TypeError, "max_lr must"),
        ({"loss_scale": 0.0}, ValueError, "loss_scale must be positive"),
        ({"loss_scale": math.nan}, ValueError, "loss_scale"),
        ({"momentum_of_lr": 1.0}, ValueError, r"momentum_of_lr must lie in \[0, 1\)"),
        ({"momentum_of_lr": -0.5}, ValueError, "momentum_of_lr"),
        ({"lr_of_lr": -1.0}, ValueError, "lr_of_lr"),
        ({"total_steps": None}, ValueError, "total_steps must be given.*write"),
        ({"total_steps": 0}, ValueError, "total_steps must be at least 1"),
        ({"total_steps": 10.0}, TypeError, "total_steps must be an int"),
        ({"auto_lr_warmup_steps": -1}, ValueError, "auto_lr_warmup_steps"),
        ({"decay": "linear"}, ValueError, 'decay must be "one_cycle" or "geometric"'),
        ({"model": nn.Linear(2, 2), "ensemble_lr_spread_ratio": 0.1}, ValueError, "model must be the one"),
        ({"model": "net"}, TypeError, "model must be a torch.nn.Module"),
    ],
)
def test_bad_arguments(options, error, match):
    with pytest.raises(error, match=match):
        OneCycleAutoLR(optimizer(), **{"max_lr": 0.1, "total_steps": 20, "model_sync_interval": 4, **options})


def test_a_missing_loss_leaves_the_schedule_where_it_was():
    with pretended():
        s = OneCycleAutoLR(optimizer(), 0.1, total_steps=20, ensemble_lr_spread_ratio=0.1, model_sync_interval=4,
                           enable_auto_lr=True, auto_lr_warmup_steps=5)  # fmt: skip
        with pytest.raises(ValueError, match="none was given"):
            take(s)
        assert s.last_epoch == 0


def test_after_close_the_rates_shown_are_the_schedules():
    with pretended():
        s = OneCycleAutoLR(optimizer(), 0.1, total_steps=20, ensemble_lr_spread_ratio=0.1, model_sync_interval=4)
        s.ensemble.close()
        for _ in range(20):  # to the last step, which has nothing to average any more
            take(s)
            assert s.get_last_lr() == s.get_replica_lr() == [g["lr"] for g in s.optimizer.param_groups]


def geometric_variants():
    results = {}
    for name, options in {"zero": {"max_lr": [0.1, 0.0]}, "observed": {"ensemble": {"observe_only": True}}}.items():
        s = OneCycleAutoLR(
            optimizer(), total_steps=20, ensemble_lr_spread_ratio=0.1, model_sync_interval=4, enable_auto_lr=True,
            auto_lr_warmup_steps=5, decay="geometric", **{"max_lr": 0.1, **options},
        )  # fmt: skip
        plain = OneCycleLR(optimizer(), options.get("max_lr", 0.1), total_steps=20)
        for _ in range(20):
            take(s, 1.0)
            take(plain)
        results[name] = (s.get_last_lr(), plain.get_last_lr())
    return results


def test_geometric_decay_with_a_rate_of_zero_and_when_only_observing():
    for results in run(geometric_variants, 2):
        assert results["zero"][0][1] == 0.0
        assert results["observed"][0] == results["observed"][1]


def drop_in(total=23, **options):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    o = optim.AdamW(model.parameters(), lr=0.1)
    if options.pop("plain", False):
        return model, o, OneCycleLR(o, 0.05, total_steps=total)
    return model, o, OneCycleAutoLR(o, 0.05, total_steps=total, model_sync_interval=4, model=model, **options)


def drop_in_train(model, o, s, steps):
    for step in steps:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step + 100 * dist.get_rank()))
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        o.zero_grad()
        loss.backward()
        o.step()
        s.step(loss) if isinstance(s, OneCycleAutoLR) else s.step()


def everything(model, o):
    moments = [v for p in model.parameters() for _, v in sorted(o.state[p].items())]
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers(), *moments)]


def spread_zero():
    counted = []
    for plain in (True, False):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model, o, s = drop_in(plain=plain)
            drop_in_train(model, o, s, range(23))
        names = [e.name for e in profile.events() if "c10d::" in e.name or "gloo:" in e.name]
        counted.append((sorted(names), s.get_last_lr(), everything(model, o)))
    return counted


def test_spread_zero_is_ddp_and_one_cycle_bit_for_bit_and_sends_nothing_more():
    for (plain_calls, plain_lr, plain), (calls, lr, ours) in run(spread_zero, 2):
        assert len(plain_calls) > 23  # the profiler sees what DDP sends
        assert calls == plain_calls
        assert lr == plain_lr
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def save_and_resume(folder, decay, cut):
    options = {"ensemble_lr_spread_ratio": 0.3, "enable_auto_lr": True, "auto_lr_warmup_steps": 5,
               "loss_scale": 0.1, "decay": decay}  # fmt: skip
    model, o, s = drop_in(**options)
    drop_in_train(model, o, s, range(cut))
    assert s.ensemble.mid_round
    path = f"{folder}/{dist.get_rank()}.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one file per replica, on purpose
        torch.save({"model": model.module.state_dict(), "optimizer": o.state_dict(), "s": s.state_dict()}, path)
    drop_in_train(model, o, s, range(cut, 23))
    resumed, o2, s2 = drop_in(**options)
    state = torch.load(path, weights_only=True)
    resumed.module.load_state_dict(state["model"])
    o2.load_state_dict(state["optimizer"])
    s2.load_state_dict(state["s"])
    drop_in_train(resumed, o2, s2, range(cut, 23))
    assert s2.state_dict() == s.state_dict()
    assert s.ensemble.scales["learning_rate/0"] != 1.0
    return all(torch.equal(a, b) for a, b in zip(everything(model, o), everything(resumed, o2), strict=True))


@pytest.mark.parametrize("decay", ["one_cycle", "geometric"])
@pytest.mark.parametrize("cut", [2, 14])
def test_resume_in_mid_round_from_a_file_per_replica_is_bitwise(tmp_path, decay, cut):
    assert run(save_and_resume, 2, str(tmp_path), decay, cut) == [True, True]


def spread_in_a_loop(cut_short):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1))
    o = optim.AdamW(model.parameters(), lr=0.1)
    s = OneCycleAutoLR(o, 0.1, total_steps=10, ensemble_lr_spread_ratio=0.5, model_sync_interval=4)
    trace = []
    for step in range(10):
        o.zero_grad()
        (
            model(torch.randn(4, 3, generator=torch.Generator().manual_seed(step + 10 * dist.get_rank()))) ** 2
        ).mean().backward()
        if not (cut_short and step in (2, 6)):  # as GradScaler skips a step
            o.step()
        s.step()
        trace.append(model.module.weight.detach().clone())
    return trace


@pytest.mark.parametrize("cut_short", [False, True])
def test_fan_out_from_the_first_step_without_a_loss_and_a_converge_at_the_last(cut_short):
    a, b = run(spread_in_a_loop, 2, cut_short)
    assert not torch.equal(a[0], b[0])
    assert not torch.equal(a[8], b[8])
    assert torch.equal(a[9], b[9])


# max_lr="auto"


def searched(size=1, **options):
    """A run that finds its rate in the constructor; what it found, and the rates of its steps by group."""
    here = hdet.find_replicas()
    torch.manual_seed(0)
    model = hdet.data_parallel(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    first, rest = list(model.parameters())[:2], list(model.parameters())[2:]
    o = torch.optim.AdamW([{"params": first}, {"params": rest, "lr": 4e-6}], lr=1e-6)
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(here.rank))
    loader = [(x[k : k + 16], x[k : k + 16].sum(1, keepdim=True).sin()) for k in range(0, 64, 16)]

    def loss_fn(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    before = [p.detach().clone() for p in model.parameters()]
    s = OneCycleAutoLR(
        o, max_lr="auto", total_steps=30, model=model, loader=loader, loss_fn=loss_fn, **options
    )  # fmt: skip
    assert all(map(torch.equal, before, model.parameters()))
    rates = []
    for step in range(30):
        rates.append([group["lr"] for group in o.param_groups])
        assert s.get_last_lr() == rates[-1]
        loss = loss_fn(model, loader[step % 4])
        loss.backward()
        o.step()
        o.zero_grad()
        s.step(loss)
    return s.ensemble.found.rates[0], rates


def test_auto_finds_the_peak_in_the_constructor_and_shows_it():
    (found, rates), *others = [*hdet.in_process(searched, 1), *hdet.in_process(searched, 1)]
    assert others == [(found, rates)]
    assert found[1] == pytest.approx(4 * found[0])
    assert found[0] > 1e-4
    assert [max(column) for column in zip(*rates, strict=True)] == pytest.approx(found)
    assert rates[0] == pytest.approx([rate / 25 for rate in found])


def test_auto_on_several_replicas_with_a_spread():
    options = {"ensemble_lr_spread_ratio": 0.3, "model_sync_interval": 5}
    (found, rates), again = hdet.in_process(lambda: searched(**options), 2)
    assert again == (found, rates)  # between steps the groups hold the schedule
    assert max(row[0] for row in rates) == pytest.approx(found[0])


@pytest.mark.parametrize("left_out", ["model", "loader", "loss_fn"])
def test_auto_says_what_it_lacks(left_out):
    o = optimizer()
    given = {"model": nn.Linear(2, 1), "loader": [torch.ones(2)], "loss_fn": lambda model, batch: model(batch).sum()}
    del given[left_out]
    with pytest.raises(ValueError, match=f'max_lr="auto" needs model, loader and loss_fn, and there is no {left_out}'):
        OneCycleAutoLR(o, "auto", total_steps=10, **given)
    with pytest.raises(ValueError, match=r"loader is for max_lr=\"auto\", got max_lr=0.1; leave it out"):
        OneCycleAutoLR(o, 0.1, total_steps=10, loader=[torch.ones(2)])
    with pytest.raises(TypeError, match="max_lr must be a number or \"auto\", got 'car'"):
        OneCycleAutoLR(o, "car", total_steps=10)


def test_a_rate_that_was_found_keeps_the_ratios_of_the_groups():
    o = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": 1.0}, {"params": [torch.zeros(1)], "lr": 3.0}])
    found = hdet.FoundRate(0.1, 0.1, ((0.1, 0.3),), (0.1, 0.4), (0.1, 0.4), 0.5, 2.0, [], [], 10, 10, 10.0, 1.0)
    OneCycleAutoLR(o, found, total_steps=10)
    assert [group["max_lr"] for group in o.param_groups] == [0.1, 0.3]


def test_auto_that_fails_leaves_the_optimizer_as_it_was():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    o = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = copy.deepcopy([{k: v for k, v in group.items() if k != "params"} for group in o.param_groups])
    with pytest.raises(hdet.FindLRError):
        OneCycleAutoLR(
            o, "auto", total_steps=100, model=model, loader=[torch.ones(4, 3)] * 8,
            loss_fn=lambda model, batch: -model(batch).square().mean() - 1,
        )  # fmt: skip
    assert [{k: v for k, v in group.items() if k != "params"} for group in o.param_groups] == before
    take_plain = torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10)
    assert take_plain.get_last_lr() == [pytest.approx(0.004)]
