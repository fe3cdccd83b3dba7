"""The found rate in every scheduler: schedules are really run, and their peak is the found rate, group by group."""

import copy
import dataclasses
import functools
import importlib
import inspect
import math
import random
import warnings

import pytest
import torch
from torch.optim import SGD, AdamW, lr_scheduler
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import SWALR

import hdet

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # of torch's nested schedulers
STEPS = 60
PRESENT = (1e-3, 4e-3)  # of the two groups
FOUND = (3e-2, 12e-2)
OTHERS = (3e-2, 5e-3)  # with another factor per group


def found_rate(*rates, total_steps=STEPS):
    """The answer of a search: a tuple of rates for each optimizer."""
    interval = (rates[0][0], 4 * rates[0][0])
    return hdet.FoundRate(
        rates[0][0], 30.0, rates, interval, interval, 0.5, 2.0, [], [], 10, 10, 10.0, 1.0, total_steps=total_steps
    )


def make(kind=SGD, lrs=PRESENT):
    return kind([{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in lrs], lr=lrs[0])


def rates_of(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def takes_a_loss(scheduler):
    scheduler = getattr(scheduler, "scheduler", scheduler)
    return "metrics" in inspect.signature(scheduler.step).parameters


def run(optimizer, scheduler, steps=STEPS):
    """The rates of every group over a run of real steps, which `get_last_lr()` agrees with."""
    rows = [rates_of(optimizer)]
    for _ in range(steps):
        for group in optimizer.param_groups:
            group["params"][0].grad = torch.zeros(2)
        optimizer.step()
        scheduler.step(*[1.0] if takes_a_loss(scheduler) else [])
        rows.append(rates_of(optimizer))
        assert [float(lr) for lr in scheduler.get_last_lr()] == rows[-1]
    return rows


def peaks(rows):
    return [max(column) for column in zip(*rows, strict=True)]


def check(build, found=FOUND, kind=SGD, lrs=PRESENT, same_shape=True, tolerance=1e-6):
    """A schedule with the found rate, beside the same one without."""
    one, other = make(kind, lrs), make(kind, lrs)
    plain, scheduler = build(one), build(other)
    answer = found_rate(tuple(found))
    assert answer.apply(other, scheduler) is answer
    assert [float(lr) for lr in scheduler.get_last_lr()] == rates_of(other)
    before, after = run(one, plain), run(other, scheduler)
    assert peaks(after) == pytest.approx(list(found), rel=tolerance)
    if same_shape:
        ratios = [rate / peak for rate, peak in zip(found, peaks(before), strict=True)]
        for old, new in zip(before, after, strict=True):
            for a, b, ratio, rate in zip(old, new, ratios, found, strict=True):
                assert b == pytest.approx(a * ratio, rel=tolerance, abs=tolerance * rate)


def halves(step):
    return 0.5 ** (step // 20)


def warm_up(step):
    return min(1.0, (step + 1) / 10)


def warm_then_cosine(optimizer):
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.01, total_iters=10), CosineAnnealingLR(optimizer, 50)], [10])


def chained_in_sequence(optimizer):
    chained = ChainedScheduler([LinearLR(optimizer, 0.1, total_iters=8), ExponentialLR(optimizer, 0.99)])
    first = SequentialLR(optimizer, [chained, StepLR(optimizer, 5)], [20])
    return SequentialLR(optimizer, [first, CosineAnnealingLR(optimizer, 20, eta_min=1e-6)], [30])


SCHEDULES = {
    "LambdaLR": lambda o: LambdaLR(o, warm_up),
    "LambdaLR, one per group": lambda o: LambdaLR(o, [warm_up, lambda step: 0.3 * halves(step)]),
    "MultiplicativeLR": lambda o: MultiplicativeLR(o, lambda step: 0.97),
    "MultiplicativeLR, up and down": lambda o: MultiplicativeLR(o, lambda step: 1.1 if step < 30 else 0.9),
    "StepLR": lambda o: StepLR(o, 10),
    "MultiStepLR": lambda o: MultiStepLR(o, [10, 30, 30]),
    "ConstantLR": lambda o: ConstantLR(o, 0.2, total_iters=10),
    "LinearLR": lambda o: LinearLR(o, 0.01, total_iters=20),
    "ExponentialLR": lambda o: ExponentialLR(o, 0.95),
    "SequentialLR": warm_then_cosine,
    "SequentialLR, nested": chained_in_sequence,
    "SequentialLR with OneCycleLR": lambda o: SequentialLR(
        o, [ConstantLR(o, 0.1, 5), OneCycleLR(o, [0.01, 0.04], total_steps=STEPS, cycle_momentum=False)], [5]
    ),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, 25, eta_min=1e-5),
    "ChainedScheduler": lambda o: ChainedScheduler([LinearLR(o, 0.1, total_iters=10), CosineAnnealingLR(o, 50)]),
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, patience=3, min_lr=[1e-6, 1e-5]),
    "ReduceLROnPlateau, one floor": lambda o: ReduceLROnPlateau(o, patience=3, min_lr=1e-5),
    "CyclicLR": lambda o: CyclicLR(o, [1e-4, 2e-4], [1e-3, 3e-3], 7, cycle_momentum=False),
    "CyclicLR, triangular2": lambda o: CyclicLR(o, 1e-4, 1e-3, 7, mode="triangular2", cycle_momentum=False),
    "CyclicLR, exp_range": lambda o: CyclicLR(o, 1e-4, 1e-3, 7, mode="exp_range", gamma=0.99, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: CosineAnnealingWarmRestarts(o, 10, 2, eta_min=1e-6),
    "OneCycleLR": lambda o: OneCycleLR(o, list(PRESENT), total_steps=STEPS, cycle_momentum=False),
    "OneCycleLR, three phases": lambda o: OneCycleLR(
        o, 0.01, total_steps=STEPS, three_phase=True, anneal_strategy="linear", cycle_momentum=False
    ),
    "PolynomialLR": lambda o: PolynomialLR(o, 50, power=2.0),
    "SWALR": lambda o: SWALR(o, [1e-4, 2e-4], anneal_epochs=20),
    "SWALR, upwards": lambda o: SWALR(o, 0.1, anneal_epochs=20, anneal_strategy="linear"),
    "OneCycleAutoLR": lambda o: hdet.OneCycleAutoLR(o, list(PRESENT), total_steps=STEPS, cycle_momentum=False),
}
WITH_ONE_FLOOR = {  # whose floor stays where the groups' factors differ
    "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "ReduceLROnPlateau, one floor", "SequentialLR, nested",
    "ReduceLROnPlateau",
}  # fmt: skip


def test_no_scheduler_of_torch_is_forgotten():
    public = set(lr_scheduler.__all__) | {"SWALR"}
    public |= {
        name for name, value in vars(lr_scheduler).items()
        if inspect.isclass(value) and issubclass(value, LRScheduler) and not name.startswith("_")
    }  # fmt: skip
    assert public - {"LRScheduler"} <= set(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_peak_is_the_found_rate_and_the_shape_stays(name):
    check(SCHEDULES[name])


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_group_has_its_own_factor(name):
    check(SCHEDULES[name], OTHERS, same_shape=name not in WITH_ONE_FLOOR)


@pytest.mark.parametrize("factor", [1e-5, 1e4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rate_that_is_far_from_the_present_one(name, factor):
    check(SCHEDULES[name], [factor * lr for lr in PRESENT])


@pytest.mark.parametrize("name", ["CyclicLR", "OneCycleLR", "OneCycleAutoLR"])
def test_schedules_that_move_the_momentum_too(name):
    kinds = {
        "CyclicLR": lambda o: CyclicLR(o, [1e-4, 2e-4], [1e-3, 3e-3], 7),
        "OneCycleLR": lambda o: OneCycleLR(o, list(PRESENT), total_steps=STEPS),
        "OneCycleAutoLR": lambda o: hdet.OneCycleAutoLR(o, list(PRESENT), total_steps=STEPS),
    }
    check(kinds[name], kind=AdamW)
    plain, changed = make(AdamW), make(AdamW)
    kinds[name](plain)
    found_rate(FOUND).apply(changed, kinds[name](changed))
    for one, other in zip(plain.param_groups, changed.param_groups, strict=True):
        assert one["betas"] == other["betas"]


@pytest.mark.parametrize("name", [name for name in SCHEDULES if "one per group" not in name])
def test_a_tensor_rate_that_groups_share(name):
    lr = torch.tensor(1e-3, dtype=torch.float64)
    optimizer = make(AdamW, (lr, lr))
    scheduler = SCHEDULES[name](optimizer)
    held = lr.item()
    found_rate((1e-2, 3e-3)).apply(optimizer, scheduler)
    assert lr.item() == held
    rows = run(optimizer, scheduler)
    assert all(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups)
    assert peaks(rows) == pytest.approx([1e-2, 3e-3], rel=1e-6)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_tensor_rate_for_each_group(name):
    optimizer = make(AdamW, [torch.tensor(lr) for lr in PRESENT])
    scheduler = SCHEDULES[name](optimizer)
    found_rate(FOUND).apply(optimizer, scheduler)
    assert peaks(run(optimizer, scheduler)) == pytest.approx(list(FOUND), rel=1e-5)


def test_groups_that_share_a_tensor_get_tensors_of_their_own():
    lr = torch.tensor(1e-3, dtype=torch.float64)
    optimizer = make(AdamW, (lr, lr))
    found_rate((1e-2, 3e-2)).apply(optimizer)
    first, second = (group["lr"] for group in optimizer.param_groups)
    assert (first.item(), second.item()) == (1e-2, 3e-2)
    assert first.dtype == torch.float64
    assert lr.item() == 1e-3


def transformers_kinds():
    from transformers import SchedulerType

    return [kind.value for kind in SchedulerType]


SPECIFIC = {
    "cosine_with_restarts": {"num_cycles": 2},
    "cosine_with_min_lr": {"min_lr": 1e-5},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-5},
    "warmup_stable_decay": {"num_decay_steps": 20},
    "reduce_lr_on_plateau": {"patience": 3},
    "greedy": {"min_lr": 1e-5, "patience": 3, "max_lr": 0.1, "reset_start": 10},
}


@pytest.mark.parametrize("found", [FOUND, OTHERS])
@pytest.mark.parametrize("kind", transformers_kinds())
def test_all_schedules_of_transformers(kind, found):
    from transformers import get_scheduler

    def build(optimizer):
        return get_scheduler(kind, optimizer, 10, STEPS, scheduler_specific_kwargs=SPECIFIC.get(kind))

    check(build, found, AdamW, same_shape=not (found == OTHERS and kind in ("reduce_lr_on_plateau", "greedy")))


def test_a_greedy_schedule_starts_again_at_the_found_rate():
    from transformers import get_scheduler

    optimizer = make()
    scheduler = get_scheduler("greedy", optimizer, scheduler_specific_kwargs={"min_lr": 1e-5, "max_lr": 0.1})
    found_rate(FOUND).apply(optimizer, scheduler)
    assert scheduler._init_lrs == pytest.approx(FOUND)
    assert scheduler.max_lrs == pytest.approx([3.0, 3.0])


def search(optimizer, model):
    x = torch.eye(2)
    y = torch.tensor([[3.0], [5.0]])

    def loss_fn(module, batch):
        return torch.nn.functional.mse_loss(module(batch[0]), batch[1])

    def step_fn(index):
        loss_fn(model, (x, y)).backward()

    return hdet.find_lr(
        model, optimizer, step_fn, probe=hdet.Probe(lambda _: [(x, y)], loss_fn), total_steps=STEPS
    )  # fmt: skip


@pytest.mark.parametrize("build", [SCHEDULES["LambdaLR"], SCHEDULES["OneCycleLR"], warm_then_cosine])
@pytest.mark.parametrize("older", [True, False])
def test_a_scheduler_made_before_the_search_or_after_it(build, older):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = SGD([{"params": [model.weight], "lr": 1e-3}, {"params": [model.bias], "lr": 2e-3}], lr=1e-3)
    scheduler = build(optimizer) if older else None
    found = search(optimizer, model)
    assert found.total_steps == STEPS
    scheduler = scheduler or build(optimizer)
    assert found.apply(optimizer, scheduler) is found
    assert peaks(run_model(optimizer, scheduler)) == pytest.approx(list(found.rates[0]), rel=1e-6)


def run_model(optimizer, scheduler):
    rows = [rates_of(optimizer)]
    for _ in range(STEPS):
        optimizer.step()
        scheduler.step()
        rows.append(rates_of(optimizer))
    return rows


def test_without_a_schedule_the_groups_get_the_found_rates():
    optimizer = make()
    found_rate(FOUND).apply(optimizer)
    assert rates_of(optimizer) == list(FOUND)
    scheduler = warm_then_cosine(optimizer)  # and one that is made then
    assert peaks(run(optimizer, scheduler)) == pytest.approx(list(FOUND))


def test_applied_twice_is_applied_once():
    optimizer = make()
    scheduler = warm_then_cosine(optimizer)
    found_rate(FOUND).apply(optimizer, scheduler)
    before = rates_of(optimizer)
    found_rate(FOUND).apply(optimizer, scheduler)
    assert rates_of(optimizer) == pytest.approx(before, rel=1e-12)


def test_several_optimizers_with_and_without_a_scheduler():
    optimizers = [make(), make(AdamW, (1e-4,)), make(SGD, (1e-2,))]
    schedulers = [warm_then_cosine(optimizers[0]), None, SCHEDULES["OneCycleAutoLR"]]
    schedulers[2] = OneCycleLR(optimizers[2], 1e-2, total_steps=STEPS)
    found_rate(FOUND, (0.2,), (0.3,)).apply(optimizers, schedulers)
    assert peaks(run(optimizers[0], schedulers[0])) == pytest.approx(list(FOUND))
    assert rates_of(optimizers[1]) == [0.2]
    assert peaks(run(optimizers[2], schedulers[2])) == pytest.approx([0.3])
    optimizers = [make(), make()]
    found_rate(FOUND, OTHERS).apply(optimizers)
    assert [rates_of(optimizer) for optimizer in optimizers] == [list(FOUND), list(OTHERS)]


@pytest.mark.parametrize("name", ["OneCycleLR", "SequentialLR", "ReduceLROnPlateau", "LambdaLR"])
@pytest.mark.parametrize("prepared_first", [True, False])
def test_what_accelerate_has_wrapped(name, prepared_first):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    inner = make()
    if prepared_first:
        optimizer = accelerator.prepare(inner)
        scheduler = accelerator.prepare(SCHEDULES[name](optimizer))
    else:
        optimizer, scheduler = accelerator.prepare(inner, SCHEDULES[name](inner))
    found_rate(FOUND).apply(optimizer, scheduler)
    assert peaks(run(optimizer, scheduler)) == pytest.approx(list(FOUND))


class PerProcess:
    """As Accelerate's in four processes."""

    step_with_optimizer, split_batches = True, False

    def __init__(self, scheduler):
        self.scheduler = scheduler


def test_a_wrapper_that_steps_once_per_process_is_looked_at_for_as_many(monkeypatch):
    def build():
        optimizer = make()
        return optimizer, LinearLR(optimizer, 0.01, total_iters=3 * STEPS)

    optimizer, scheduler = build()
    with pytest.raises(ValueError, match="steps="):
        found_rate(FOUND).apply(optimizer, PerProcess(scheduler))
    monkeypatch.setattr("hdet._find_lr.apply._processes", lambda: 4)
    found_rate(FOUND).apply(optimizer, PerProcess(scheduler))
    assert peaks(run(optimizer, scheduler, 4 * STEPS)) == pytest.approx(list(FOUND))


@pytest.mark.parametrize("name", [name for name in SCHEDULES if "Lambda" not in name])
def test_a_run_that_is_saved_goes_on_with_the_found_schedule(name):
    optimizer = make()
    scheduler = SCHEDULES[name](optimizer)
    found_rate(FOUND).apply(optimizer, scheduler)
    rows = run(optimizer, scheduler, 25)
    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    rest = run(optimizer, scheduler, STEPS - 25)
    assert peaks(rows + rest) == pytest.approx(list(FOUND))
    resumed = make()
    again = SCHEDULES[name](resumed)
    again.load_state_dict(saved[1])
    resumed.load_state_dict(saved[0])
    assert run(resumed, again, STEPS - 25) == rest


def floors(scheduler):
    return [rate.floor for rate in scheduler.ensemble.engine.run.settings.hyperparameters]


def test_the_floors_of_the_ensemble_go_along_and_survive_a_resume():
    def build():
        optimizer = make()
        return optimizer, hdet.OneCycleAutoLR(optimizer, list(PRESENT), total_steps=STEPS)

    optimizer, scheduler = build()
    before = floors(scheduler)
    assert all(before)
    found_rate(OTHERS).apply(optimizer, scheduler)
    wanted = [floor * rate / lr for floor, rate, lr in zip(before, OTHERS, PRESENT, strict=True)]
    assert floors(scheduler) == pytest.approx(wanted)
    assert floors(scheduler) == pytest.approx([g["min_lr"] for g in optimizer.param_groups])
    other, resumed = build()
    resumed.load_state_dict(scheduler.state_dict())
    other.load_state_dict(optimizer.state_dict())
    assert floors(resumed) == pytest.approx(wanted)


def test_a_geometric_decay_reaches_the_found_rate():
    from single import pretended

    with pretended(0, 2):
        optimizer = make()
        scheduler = hdet.OneCycleAutoLR(
            optimizer, list(PRESENT), total_steps=STEPS, ensemble_lr_spread_ratio=1 / 9, model_sync_interval=5,
            auto_lr_warmup_steps=10, enable_auto_lr=True, decay="geometric",
        )  # fmt: skip
        plain = OneCycleLR(make(), list(PRESENT), total_steps=STEPS)
        curve = [plain.get_last_lr()]
        for _ in range(9):
            plain.step()
            curve.append(plain.get_last_lr())
        found_rate(FOUND).apply(optimizer, scheduler)
        start = [group["initial_lr"] for group in optimizer.param_groups]
        ratios = [rate / peak for rate, peak in zip(FOUND, peaks(curve), strict=True)]  # falls from step 10 on
        assert start == pytest.approx([lr * ratio for lr, ratio in zip(curve[0], ratios, strict=True)])


def test_a_group_at_zero_stays_there():
    optimizer = make(SGD, (1e-3, 0.0))
    scheduler = CosineAnnealingLR(optimizer, 25)
    found_rate((3e-2, 0.0)).apply(optimizer, scheduler)
    assert peaks(run(optimizer, scheduler)) == pytest.approx([3e-2, 0.0])
    optimizer = make(SGD, (0.0, 1e-3))
    found_rate((0.0, 3e-2)).apply(optimizer)
    assert rates_of(optimizer) == [0.0, 3e-2]
    optimizer = make(SGD, (1e-3, 1e-3))  # its rate was 0 in the search
    scheduler = OneCycleLR(optimizer, 1e-3, total_steps=STEPS)
    found_rate((3e-2, 0.0)).apply(optimizer, scheduler)
    assert peaks(run(optimizer, scheduler)) == pytest.approx([3e-2, 0.0])


def test_one_floor_for_groups_whose_factors_differ_stays():
    optimizer = make()
    scheduler = CosineAnnealingLR(optimizer, 30, eta_min=1e-4)
    found_rate(OTHERS).apply(optimizer, scheduler)
    assert scheduler.eta_min == 1e-4
    rows = run(optimizer, scheduler, 30)
    assert peaks(rows) == pytest.approx(list(OTHERS))
    assert rows[-1] == pytest.approx([1e-4, 1e-4])


class AtAnAbsoluteRate(LRScheduler):
    """Its warm-up is relative, what follows is not."""

    def get_lr(self):
        if self.last_epoch < 10:
            return [base * (self.last_epoch + 1) / 10 for base in self.base_lrs]
        return [2e-3 for _ in self.base_lrs]


class WithTargets(LRScheduler):
    """The same with the rates in attributes that say so."""

    def __init__(self, optimizer):
        self.target_lr, self.warmup_lrs = 2e-3, [1e-5, 1e-5]
        super().__init__(optimizer)

    def get_lr(self):
        return list(self.warmup_lrs) if self.last_epoch < 10 else [self.target_lr for _ in self.base_lrs]


class Around:
    """A scheduler of another family around one of torch's."""

    def __init__(self, optimizer, after):
        self.optimizer, self.after, self.base_lrs, self.count = optimizer, after, list(after.base_lrs), 0

    def step(self):
        self.count += 1
        if self.count > 5:
            self.after.step()
        else:
            for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
                group["lr"] = base * self.count / 5

    def get_last_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]


def test_schedulers_of_users():
    check(lambda o: Around(o, CosineAnnealingLR(o, 40)), OTHERS)
    check(WithTargets, (1e-2, 1e-2))


class NeedsAnEpoch(LambdaLR):
    def step(self, epoch):
        super().step()

    def _initial_step(self):
        self._step_count = 0
        super().step()


class CannotBeCopied(LambdaLR):
    def __init__(self, optimizer):
        super().__init__(optimizer, warm_up)
        self.lines = (line for line in "abc")


def everything(optimizer, scheduler):
    """All that may change, with the very objects."""
    parts = [scheduler, *getattr(scheduler, "_schedulers", [])] if scheduler is not None else []
    groups = [dict(group) for group in optimizer.param_groups]
    values = [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in groups]
    held = [dict(vars(part)) for part in parts]
    lists = [{k: list(v) for k, v in part.items() if isinstance(v, list)} for part in held]
    return groups, values, held, lists


def check_refused(build, error, message, found=FOUND, optimizer=None, **given):
    optimizer = optimizer or make()
    scheduler = build(optimizer)
    before = everything(optimizer, scheduler)
    generators = torch.get_rng_state(), random.getstate()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises(error, match=message):
            found_rate(found, total_steps=given.pop("total_steps", STEPS)).apply(optimizer, scheduler, **given)
    after = everything(optimizer, scheduler)
    assert after[1] == before[1]
    assert after[3] == before[3]
    for one, other in zip([*before[0], *before[2]], [*after[0], *after[2]], strict=True):
        assert one.keys() == other.keys()
        assert all(one[key] is other[key] for key in one)
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert not seen


REFUSED = r"(?s){}.*everything is as it was.*max_lr=list\(found\.rates\[0\]\)"


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (AtAnAbsoluteRate, ValueError, REFUSED.format("AtAnAbsoluteRate holds a rate")),
        (lambda o: NeedsAnEpoch(o, warm_up), ValueError, REFUSED.format("NeedsAnEpoch cannot be run ahead")),
        (CannotBeCopied, ValueError, REFUSED.format("CannotBeCopied cannot be run ahead")),
        (lambda o: LambdaLR(o, lambda step: 1 / 0 if step else 1), ValueError, REFUSED.format("LambdaLR cannot be")),
        (lambda o: LambdaLR(o, lambda step: 1 / (9 - step)), ValueError, REFUSED.format("LambdaLR cannot be")),
        (lambda o: LambdaLR(o, lambda step: 0.0), ValueError, r"highest is 0; set its lr to found\.rates\[0\]\[0\]"),
        (lambda o: LambdaLR(o, lambda step: math.inf), ValueError, r"not finite; write found\.apply\(.*steps=100"),
        (lambda o: LambdaLR(o, lambda step: step + 1), ValueError, r"still raises the rate in step 60.*steps=10_000"),
        (lambda o: CyclicLR(o, 1e-4, 1e-3, cycle_momentum=False), ValueError, r"CyclicLR still raises.*steps="),
        (lambda o: StepLR(make(), 10), ValueError, r"another optimizer's; write found\.apply\(scheduler\.optimizer"),
        (lambda o: 0.1, TypeError, r"must be a learning-rate scheduler.*got float"),
        (lambda o: [StepLR(o, 10), StepLR(o, 20)], ValueError, r"got 2 for 1; write for example scheduler=scheduler"),
    ],
)  # fmt: skip
def test_what_is_refused_leaves_everything_as_it_was(build, error, message):
    if isinstance(build(make()), LRScheduler):
        check_refused(build, error, message)
    else:
        with pytest.raises(error, match=message):
            optimizer = make()
            found_rate(FOUND).apply(optimizer, build(optimizer))
        assert rates_of(optimizer) == list(PRESENT)


def test_a_schedule_without_its_scheduler_is_refused():
    for build in (warm_then_cosine, SCHEDULES["OneCycleLR"]):
        optimizer = make()
        build(optimizer)
        check_refused(lambda _: None, ValueError, r"write found\.apply\(optimizer, scheduler\)", optimizer=optimizer)


def test_a_floor_above_the_found_rate_of_one_group_is_refused():
    def build(optimizer):
        return CosineAnnealingLR(optimizer, 30, eta_min=1e-3)

    check_refused(build, ValueError, "CosineAnnealingLR holds a rate", (1e-2, 5e-4))


def test_other_groups_optimizers_and_steps_are_refused():
    check_refused(warm_then_cosine, ValueError, "the 3 parameter groups.*got 2.*call find_lr", (1.0, 2.0, 3.0))
    check_refused(warm_then_cosine, ValueError, "steps must be at least 1", steps=0)
    check_refused(warm_then_cosine, TypeError, "steps must be an int", steps=1.5)
    optimizers = [make(), make()]
    with pytest.raises(ValueError, match=r"what find_lr was given, 1 of them, got 2"):
        found_rate(FOUND).apply(optimizers)
    with pytest.raises(ValueError, match=r"2 of them, got 1; write found\.apply\(\[optimizer"):
        found_rate(FOUND, FOUND).apply(optimizers[0])
    with pytest.raises(ValueError, match=r"got 1 for 2; write for example scheduler=\[scheduler, None\]"):
        found_rate(FOUND, FOUND).apply(optimizers, warm_then_cosine(optimizers[0]))
    with pytest.raises(TypeError, match="optimizer must be a torch"):
        found_rate(FOUND).apply("adam")
    assert rates_of(optimizers[1]) == list(PRESENT)


def test_a_scheduler_that_is_refused_leaves_the_optimizers_before_it_alone():
    optimizers = [make(), make()]
    schedulers = [warm_then_cosine(optimizers[0]), AtAnAbsoluteRate(optimizers[1])]
    before = everything(optimizers[0], schedulers[0])
    with pytest.raises(ValueError, match=r"found\.rates\[1\]"):
        found_rate(FOUND, FOUND).apply(optimizers, schedulers)
    assert everything(optimizers[0], schedulers[0])[1:2] == before[1:2]


def test_how_far_is_looked_ahead():
    def rising(steps):
        optimizer = make()
        return optimizer, LinearLR(optimizer, 0.01, total_iters=steps)

    optimizer, scheduler = rising(5000)
    with pytest.raises(ValueError, match="in step 1000"):
        found_rate(FOUND, total_steps=None).apply(optimizer, scheduler)
    found_rate(FOUND, total_steps=None).apply(optimizer, scheduler, steps=10_000)
    assert peaks(run(optimizer, scheduler, 5000)) == pytest.approx(list(FOUND))
    optimizer, scheduler = rising(500)
    found_rate(FOUND).apply(optimizer, scheduler, steps=STEPS)  # the run ends in the warm-up, as the caller says
    assert peaks(run(optimizer, scheduler)) == pytest.approx(list(FOUND))
    optimizer = make()
    scheduler = OneCycleLR(optimizer, 0.01, total_steps=5000, pct_start=0.9)
    found_rate(FOUND, total_steps=None).apply(optimizer, scheduler)
    assert peaks(run(optimizer, scheduler, 5000)) == pytest.approx(list(FOUND))


def test_not_more_than_a_hundred_thousand_steps_are_looked_at(monkeypatch):
    monkeypatch.setattr("hdet._find_lr.apply._MOST_STEPS", 500)
    optimizer = make()
    scheduler = LinearLR(optimizer, 0.01, total_iters=5000)
    with pytest.raises(ValueError, match=r"in step 500.*make the scheduler after the search"):
        found_rate(FOUND).apply(optimizer, scheduler, steps=10_000)
    scheduler = warm_then_cosine(optimizer)
    found_rate(FOUND, total_steps=10**9).apply(optimizer, scheduler)
    assert peaks(run(optimizer, scheduler)) == pytest.approx(list(FOUND))


def test_in_the_middle_of_a_run_the_peak_is_that_of_the_rest():
    optimizer = make()
    scheduler = OneCycleLR(optimizer, list(PRESENT), total_steps=2 * STEPS, cycle_momentum=False)
    run(optimizer, scheduler, STEPS)
    found_rate(FOUND).apply(optimizer, scheduler)
    assert rates_of(optimizer) == pytest.approx(list(FOUND))
    assert peaks(run(optimizer, scheduler)) == pytest.approx(list(FOUND))


def test_random_numbers_and_weights_are_untouched():
    numpy = importlib.import_module("numpy")
    optimizer = make()
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)

    def noisy(noise, step):
        return 1 + 0.1 * noise() if step else 1.0

    for noise in (torch.rand, random.random, numpy.random.rand):
        draw = functools.partial(noise, ()) if noise is torch.rand else noise
        scheduler = LambdaLR(optimizer, functools.partial(noisy, lambda draw=draw: float(draw())))
        states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
        before = [group["params"][0].clone() for group in optimizer.param_groups]
        found_rate(FOUND).apply(optimizer, scheduler, steps=STEPS)
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert all((a == b).all() if hasattr(a, "all") else a == b for a, b in zip(
            numpy.random.get_state(), states[2], strict=True
        ))  # fmt: skip
        assert all(
            torch.equal(group["params"][0], old) for group, old in zip(optimizer.param_groups, before, strict=True)
        )
        assert peaks(run(optimizer, scheduler)) == pytest.approx(list(FOUND))


def test_nothing_is_warned_of_and_nothing_is_left_behind():
    optimizer = make()
    keys = [set(group) for group in optimizer.param_groups]
    hooks = len(optimizer._optimizer_step_pre_hooks)
    scheduler = warm_then_cosine(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found_rate(FOUND).apply(optimizer, scheduler)
    assert [set(group) - {"initial_lr"} for group in optimizer.param_groups] == keys
    assert len(optimizer._optimizer_step_pre_hooks) == hooks
    assert not optimizer.state


def test_rates_of_other_parameters_or_in_another_order_are_refused():
    small, large = (torch.optim.SGD([torch.zeros(size)], lr=0.1) for size in (1, 5))
    found = dataclasses.replace(found_rate((0.2,)), rates=((0.2,), (0.4,)), sizes=((1,), (5,)))
    with pytest.raises(ValueError, match=r"groups of \(\(1,\), \(5,\)\) parameters, got optimizers with groups of"):
        found.apply([large, small])
    assert [o.param_groups[0]["lr"] for o in (small, large)] == [0.1, 0.1]
    found.apply([small, large])
    assert [o.param_groups[0]["lr"] for o in (small, large)] == pytest.approx([0.2, 0.4])
