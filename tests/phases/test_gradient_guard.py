"""A step whose gradient is not finite is no step, whatever the optimizer."""

import math

import pytest
import torch
from cases import OPTIMIZERS, Net, batch
from processes import run
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet._phases.guard.gradients import GradientGuard
from hdet._tensors.finite import finite, flags, not_finite


def steps(name, bad, guarded):
    """Weights and optimizer state after four steps, of which the third has a bad gradient or is left out."""
    torch.manual_seed(0)
    model = Net()
    optimizers = OPTIMIZERS[name](model)
    guard = GradientGuard(optimizers) if guarded else None
    for step in range(4):
        x, y = batch(0, step)
        for o in optimizers:
            o.zero_grad()
        buffers = [b.clone() for b in model.buffers()]
        (model(x) - y).square().mean().backward()
        if step == 2:
            for b, before in zip(model.buffers(), buffers, strict=True):
                b.copy_(before)
            if not guarded:
                continue
            for o in optimizers:
                o.param_groups[-1]["params"][-1].grad.view(-1)[0] = bad
        for o in optimizers:
            o.step()
            assert not hasattr(o, "found_inf")
        if guarded:
            guard.count()
    state = [v for o in optimizers for s in o.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return [p.detach() for p in model.parameters()] + state, guard


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_is_as_if_the_step_had_not_been(name, bad):
    (ours, guard), (theirs, _) = steps(name, bad, True), steps(name, bad, False)
    assert len(ours) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert float(guard.skipped) == 1  # one step, of one optimizer or two


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_what_is_finite(dtype):
    large = torch.full((1000,), 6e4, dtype=dtype)  # the sum overflows in half precision
    assert float(not_finite([large, large[:3]])) == 0.0
    assert float(finite([large, torch.arange(3)], torch.device("cpu"))) == 1.0
    bad = large.clone()
    bad[7] = math.nan
    kept = large.clone()
    assert float(not_finite([large, bad])) == 1.0
    assert float(finite([large, bad], torch.device("cpu"))) == 0.0
    assert torch.equal(large, kept)
    assert not_finite([]) is None


NARROW = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]


@pytest.mark.parametrize("dtype", NARROW)
def test_numbers_of_8_bits_are_seen(dtype):
    good, bad = torch.ones(4).to(dtype), torch.tensor([1.0, math.nan]).to(dtype)
    assert flags([good, torch.ones(2), bad], torch.device("cpu")).tolist() == [True, False, True]  # by dtype
    assert float(not_finite([good])) == 0.0
    assert float(not_finite([torch.ones(2), bad])) == 1.0


class Quantized(nn.Module):
    """A layer, and a buffer of a few bits for each number."""

    def __init__(self, dtype):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("table", torch.full((4,), 56, dtype=torch.uint8).view(dtype))

    def forward(self, x):
        return self.layer(x)


def with_few_bits(dtype, path, tail, options):
    if tail:
        options = {**options, "probe": hdet.Probe(torch.ones(64, 2), scored, size=8)}
    model = Quantized(dtype)
    before = model.table.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ensemble = hdet.Ensemble(
        optimizer, [hdet.learning_rate(optimizer)], total_steps=20, interval=5, model=model,
        averaging=hdet.Averaging(tail=tail, followers=[Quantized(dtype), before.clone()]), **options,
    )  # fmt: skip
    parts = {"model": model, "optimizer": optimizer, "ensemble": ensemble}
    for step in range(20):
        loss = model(torch.ones(1, 2)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step(loss)
        if step == 11:
            hdet.save(path, parts)
    return torch.equal(model.table.view(torch.uint8), before.view(torch.uint8))


def scored(model, batch):
    return model(batch).square().mean()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, getattr(torch, "float4_e2m1fn_x2", None)])
@pytest.mark.parametrize(
    ("tail", "options"),
    [(None, {}), (None, {"safety": hdet.Safety(guard=True, rollback=hdet.Rollback())}), (0.5, {})],
)
@pytest.mark.filterwarnings("ignore")
def test_buffers_of_few_bits_end_no_run(tmp_path, dtype, tail, options):
    if dtype is None:
        pytest.skip("this torch has no such dtype")
    assert hdet.in_process(with_few_bits, 2, dtype, tmp_path, tail, options) == [True, True]
    model = Quantized(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ensemble = hdet.Ensemble(optimizer, [hdet.learning_rate(optimizer)], total_steps=20, interval=5, model=model)
    if not tail:  # of another number of replicas: their mean
        assert hdet.load(tmp_path, {"model": model, "optimizer": optimizer, "ensemble": ensemble}).step == 12
    ensemble.close()


@pytest.mark.parametrize("odd", [complex(math.nan, 1), complex(1, -math.inf)])
def test_complex_numbers_are_seen(odd):
    whole = torch.ones(4, 3, dtype=torch.complex64)
    bad = whole.clone()
    bad[1, 2] = odd
    for good_one, bad_one in (
        (whole, bad),
        (whole.t(), bad.t()),
        (whole.conj(), bad.conj()),
        (whole.cdouble(), bad.cdouble()),
    ):
        assert float(not_finite([torch.ones(2), good_one])) == 0.0
        assert float(not_finite([torch.ones(2), bad_one])) == 1.0
        assert float(finite([good_one], torch.device("cpu"))) == 1.0
        assert float(finite([torch.ones(2), bad_one], torch.device("cpu"))) == 0.0
    assert bool((whole == 1).all())


def test_large_numbers_are_finite():
    large = torch.full((1000, 4), 3e38)
    assert float(finite([large], torch.device("cpu"))) == 1.0
    assert float(not_finite([large.t()])) == 0.0  # not contiguous


def test_sparse_and_strided_gradients_are_seen():
    table = nn.Embedding(5, 2, sparse=True)
    (table(torch.tensor([1, 1])) * math.inf).sum().backward()
    assert float(not_finite([table.weight.grad])) == 1.0
    wide = torch.ones(4, 4)
    wide[0, 0] = math.nan
    assert float(not_finite([wide.t()])) == 1.0
    assert float(not_finite([wide[:, 1:]])) == 0.0


def test_a_closure_and_a_step_within_a_step():
    class Twice(optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            return super().step(closure)

    p = nn.Parameter(torch.ones(2))
    o = Twice([p], lr=0.1, momentum=0.9)
    guard = GradientGuard([o])

    def closure():
        o.zero_grad()
        with torch.enable_grad():
            loss = (p * math.nan).sum()
        loss.backward()
        return loss

    o.step(closure)
    guard.count()
    assert torch.equal(p, torch.ones(2))
    assert guard.skipped == 1
    guard.close()
    assert not o._optimizer_step_pre_hooks


def test_it_says_when_nothing_goes_on():
    for fused in (False, True):
        p = nn.Parameter(torch.ones(2))
        o = optim.SGD([p], lr=0.1, fused=fused)
        guard, stuck = GradientGuard([o]), []
        for step in range(40):
            p.grad = torch.full((2,), math.nan if step >= 10 else 1.0)
            o.step()
            guard.count()
            stuck.append(guard.stuck)
        assert stuck.index(True) == (15 if fused else 12)
        assert float(guard.skipped) == 30


def with_a_scaler(guarded):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1))
    o = optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    ensemble = hdet.Ensemble(o, [hdet.learning_rate(o, spread=0.3)], interval=4, safety=hdet.Safety(guard=guarded))
    for step in range(8):
        loss = model(torch.ones(2, 3) * (1 + step)).square().mean() * (math.inf if step == 3 else 1)
        scaler.scale(loss).backward()
        scaler.step(o)
        scaler.update()
        o.zero_grad()
        ensemble.step(loss if step != 3 else 1.0)
    ensemble.close()
    return scaler.get_scale(), [p.tolist() for p in model.parameters()]


def test_beside_a_grad_scaler_it_changes_nothing():
    assert run(with_a_scaler, 2, True) == run(with_a_scaler, 2, False)


def without_a_spread(bad_steps):
    p = nn.Parameter(torch.ones(2))
    o = optim.SGD([p], lr=0.1)
    ensemble = hdet.Ensemble(o, [hdet.learning_rate(o, spread=0.0)], interval=6, safety=hdet.Safety(guard=True))
    for step in range(30 if len(bad_steps) > 1 else 12):
        p.grad = torch.full((2,), math.nan if step in bad_steps else 1.0)
        o.step()
        ensemble.step(1.0)
    return p.tolist()


def test_without_a_spread_it_is_said_too():
    with pytest.warns(UserWarning, match="guard: skipped 1 of 6 steps, as"):
        assert without_a_spread({3}) == pytest.approx([-0.1, -0.1])
    with pytest.raises(RuntimeError, match=r"no gradient is finite any more at step 15.*hdet\.Safety\(rollback=True\)"):
        without_a_spread(range(6, 30))


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_raised_does_not_turn_it_off(fused):
    p = nn.Parameter(torch.ones(2))
    o = optim.SGD([p], lr=0.1, fused=fused)
    guard = GradientGuard([o])

    def fail(*_):
        raise MemoryError

    failing = o.register_step_pre_hook(fail)
    p.grad = torch.ones(2)
    with pytest.raises(MemoryError):
        o.step()
    guard.count()
    failing.remove()
    assert not hasattr(o, "found_inf")
    before = p.detach().clone()
    p.grad = torch.full((2,), math.nan)
    o.step()
    guard.count()
    assert torch.equal(p, before)
    assert float(guard.skipped) == 1


@pytest.mark.parametrize("fused", [(False, False), (False, True), (True, False), (True, True)])
def test_a_good_second_optimizer_does_not_hide_a_bad_first_one(fused):
    parameters = [nn.Parameter(torch.ones(2)) for _ in fused]
    optimizers = [optim.SGD([p], lr=0.1, fused=f) for p, f in zip(parameters, fused, strict=True)]
    guard = GradientGuard(optimizers)
    for step in range(16):
        for p, bad in zip(parameters, (math.nan, 1.0), strict=True):
            p.grad = torch.full((2,), bad if step >= 8 else 1.0)
        for o in optimizers:
            o.step()
        guard.count()
    assert float(guard.skipped) == 8
    assert guard.stuck


def always_nan_on_one():
    torch.manual_seed(0)
    rank = hdet.find_replicas().rank
    model = hdet.data_parallel(nn.Linear(3, 1))
    o = optim.SGD(model.parameters(), lr=0.1)
    ensemble = hdet.Ensemble(
        o,
        [hdet.learning_rate(o, spread=0.2)],
        total_steps=60,
        interval=5,
        controller=hdet.controllers.Fixed(),
        safety=hdet.Safety(guard=True),
    )
    for step in range(60):
        loss = model(torch.ones(2, 3)).square().mean() * (math.nan if rank == 1 else 1.0)
        o.zero_grad()
        loss.backward()
        o.step()
        try:
            ensemble.step(loss)
        except RuntimeError as error:
            return step, str(error)
    return 60, ""


def test_a_run_in_which_no_step_is_taken_ends_and_says_whose_fault_it_is():
    (at, said), *others = run(always_nan_on_one, 2)
    assert others == [(at, said)]
    assert at < 20
    assert "every step of the round was skipped (" in said
    assert "as the gradient was not finite; replica 1 had a loss" in said


def test_what_it_cannot_be_is_refused():
    o = optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(TypeError, match="guard must be True or False, got 'yes'"):
        hdet.Ensemble(o, total_steps=5, safety=hdet.Safety(guard="yes"))


class Told(optim.SGD):
    """Takes `found_inf`, as torch's fused optimizers do, and keeps it."""

    _step_supports_amp_scaling = True

    def step(self, closure=None):
        self.seen = self.found_inf


def test_a_fused_optimizer_is_told_on_the_device():
    p = nn.Parameter(torch.zeros(3, device="meta"))
    p.grad = torch.ones_like(p)
    told, plain = Told([p], lr=0.1), optim.SGD([p], lr=0.1)
    guards = GradientGuard([told]), GradientGuard([plain])
    told.step()
    guards[0].count()
    assert told.seen.is_meta
    assert guards[0].skipped.is_meta
    with pytest.raises((RuntimeError, NotImplementedError)):  # the others need a read, which fails on this device
        plain.step()
