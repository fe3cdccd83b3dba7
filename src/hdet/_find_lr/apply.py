"""Give found rates to optimizers and their schedulers: a schedule keeps its shape, and its peak becomes the found rate.

A copy of the schedule is run ahead, before and after its rates are multiplied. Only then the real ones are written.
"""

from __future__ import annotations

import copy
import inspect
import math
import numbers
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet._arguments import check_count
from hdet._hooks import unwrap
from hdet._tensors.restore import Generators

Group = dict[str, Any]
Change = tuple[dict[str, Any], str, Any]  # where, under which key, the new value
NewValue = Callable[[Any, int | None], Any]  # of a rate and its group's number; None if it is for all groups
Curve = list[list[float]]  # the rate of every group, step by step

_STEPS = 1000  # run ahead where nobody tells how long the run is
_MOST_STEPS = 100_000
_CLOSE = 1e-6
_RATE = re.compile(r"(^|_)(lrs?|etas?)(_(min|max|start|end|init|initial|final)s?)?$")
_METRICS = ("metrics", "metric", "loss", "val_loss")
_QUIET = threading.Lock()  # replicas may be threads, which share the filters of warnings


def sizes_of(optimizers: Sequence[Optimizer]) -> tuple[tuple[int, ...], ...]:
    """How many numbers every group trains, optimizer by optimizer."""
    return tuple(tuple(sum(p.numel() for p in group["params"]) for group in o.param_groups) for o in optimizers)


def check_sizes(sizes: Sequence[Sequence[int]], optimizer: Any) -> None:
    """Raise for optimizers of other parameters than those that the rates were found for, or in another order.

    Raises:
        ValueError: with the numbers of both.
    """
    several = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    given = sizes_of([unwrap(entry) for entry in several])
    wanted = tuple(map(tuple, sizes))
    if list(map(len, given)) == list(map(len, wanted)) and given != wanted:
        raise ValueError(
            f"the rates were found for groups of {wanted} parameters, got optimizers with groups of {given}; pass what "
            "find_lr was given, in the same order"
        )


class _StandIn(Optimizer):
    """An optimizer for the copy of a scheduler to write into."""

    _opt_called = True  # torch's schedulers warn unless the optimizer has stepped

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__([torch.zeros(1)], dict(optimizer.defaults))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """There is nothing to train."""


_StandIn.step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


class _Length(NamedTuple):
    """How many steps of the scheduler to run ahead, and whether the run is known to have no more."""

    steps: int
    known: bool


class _Plan(NamedTuple):
    """What is to be written for one optimizer: all changes, and by what its groups are multiplied."""

    changes: list[Change]
    parts: list[Any]
    ratios: list[float]


class _Target(NamedTuple):
    """One optimizer, its number and the rates that were found for its groups."""

    optimizer: Optimizer
    number: int
    rates: Sequence[float]


def apply_rates(
    found: Sequence[Sequence[float]], total_steps: int | None, optimizer: Any, scheduler: Any, steps: int | None
) -> None:
    """Multiply all rates of each parameter group, and of its schedule, so that the peak is the found one.

    Args:
        found: the rate of every group, optimizer by optimizer.
        total_steps: of the run, if the search was told.
        optimizer, scheduler, steps: as in `FoundRate.apply`.

    Raises:
        TypeError, ValueError: as `FoundRate.apply` does. Nothing is changed then.
    """
    if steps is not None:
        check_count("steps", steps, unit="steps of the scheduler")
    targets = _targets(optimizer, found)
    generators = Generators()
    try:
        plans = [
            _plan(target, one, steps, total_steps, generators)
            for target, one in zip(targets, _schedulers(scheduler, len(targets)), strict=True)
        ]
    finally:
        generators.restore()
    for plan in plans:
        _write(plan.changes)
        for part in plan.parts:
            if hasattr(part, "_rates_multiplied"):  # `hdet.OneCycleAutoLR` has rates in its ensemble too
                part._rates_multiplied(plan.ratios)


def _targets(optimizer: Any, found: Sequence[Sequence[float]]) -> list[_Target]:
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    optimizers = [unwrap(entry) for entry in given]
    if len(optimizers) != len(found):
        raise ValueError(
            f"optimizer must be what find_lr was given, {len(found)} of them, got {len(optimizers)}; write "
            f"found.apply({'[optimizer, ...]' if len(found) > 1 else 'optimizer'}, ...)"
        )
    for number, (entry, rates) in enumerate(zip(optimizers, found, strict=True)):
        if len(entry.param_groups) != len(rates):
            raise ValueError(
                f"optimizer {number} must have the {len(rates)} parameter groups that a rate was found for, got "
                f"{len(entry.param_groups)}; add groups first and then call find_lr"
            )
    return [_Target(entry, number, rates) for number, (entry, rates) in enumerate(zip(optimizers, found, strict=True))]


def _schedulers(scheduler: Any, optimizers: int) -> list[Any]:
    if scheduler is None:
        return [None] * optimizers
    given = list(scheduler) if isinstance(scheduler, (list, tuple)) else [scheduler]
    if len(given) != optimizers:
        raise ValueError(
            f"scheduler must be one for each optimizer, None for those without, got {len(given)} for {optimizers}; "
            f"write for example scheduler={'scheduler' if optimizers == 1 else '[scheduler, None]'}"
        )
    return given


def _plan(target: _Target, scheduler: Any, steps: int | None, total_steps: int | None, generators: Generators) -> _Plan:
    """What to write for one optimizer, after a look ahead."""
    if scheduler is None:
        return _without_schedule(target)
    inner, calls = _unwrapped(scheduler)
    if inner.optimizer is not target.optimizer and unwrap(inner.optimizer) is not target.optimizer:
        raise ValueError(
            f"the scheduler, {_name(inner)}, must be that of optimizer {target.number}, but it is another optimizer's; "
            "write found.apply(scheduler.optimizer, scheduler), and lists in the order that find_lr was given"
        )
    length = _length(inner, steps, total_steps, calls)
    with _QUIET, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _with_schedule(target, inner, length, generators)


def _without_schedule(target: _Target) -> _Plan:
    groups = target.optimizer.param_groups
    if any("initial_lr" in group for group in groups):
        raise ValueError(
            f"optimizer {target.number} has a schedule ('initial_lr' in its parameter groups), which would undo the "
            "found rate; write found.apply(optimizer, scheduler)"
        )
    ratios = _ratios(target, [[float(group["lr"]) for group in groups]], "the optimizer")
    changes = _rewritten(groups, [], _multiplied(ratios))
    exact = [(group, "lr", _put(group["lr"], rate)) for group, rate in zip(groups, target.rates, strict=True)]
    return _Plan(changes + exact, [], ratios)


def _with_schedule(target: _Target, scheduler: Any, length: _Length, generators: Generators) -> _Plan:
    groups, parts, name = target.optimizer.param_groups, _parts(scheduler), _name(scheduler)
    before = _run_ahead(target, scheduler, [], length.steps, generators)
    _check_peak_seen(before, length, name)
    ratios = _ratios(target, before, name)
    new = _multiplied(ratios)
    after = _run_ahead(target, scheduler, ratios, length.steps, generators)
    exempt = _differ(ratios) and any(value for value in _common(groups, parts))
    if not (_reaches(after, target.rates) and (exempt or _keeps_shape(before, after, ratios))):
        raise _refusal(target, scheduler, "holds a rate that does not follow those of the parameter groups")
    return _Plan(_rewritten(groups, parts, new), parts, ratios)


def _unwrapped(scheduler: Any) -> tuple[Any, int]:
    """The scheduler inside Accelerate's, and how often that one steps it for each step."""
    inner, calls = scheduler, 1
    while not hasattr(inner, "optimizer") and hasattr(inner, "scheduler"):
        if getattr(inner, "step_with_optimizer", False) and not getattr(inner, "split_batches", True):
            calls *= _processes()
        inner = inner.scheduler
    if not (hasattr(inner, "optimizer") and callable(getattr(inner, "step", None))):
        raise TypeError(
            f"scheduler must be a learning-rate scheduler of torch or the like, got {type(scheduler).__name__}; write "
            "found.apply(optimizer, scheduler)"
        )
    return inner, calls


def _processes() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _length(scheduler: Any, steps: int | None, total_steps: int | None, calls: int) -> _Length:
    if steps is not None or total_steps is not None:
        wanted, known = (steps or total_steps or 1) * calls, steps is not None
    else:
        own = [getattr(part, "total_steps", None) for part in _parts(scheduler)]
        longest = max((entry for entry in own if isinstance(entry, int)), default=0)
        wanted, known = longest or _STEPS, bool(longest)
    return _Length(min(wanted, _MOST_STEPS), known and wanted <= _MOST_STEPS)


def _parts(scheduler: Any) -> list[Any]:
    """The scheduler and those that it is made of, each once."""
    found, waiting = [scheduler], [scheduler]
    while waiting:
        for value in vars(waiting.pop()).values():
            for entry in value if isinstance(value, (list, tuple)) else (value,):
                of_it = not isinstance(entry, Optimizer) and hasattr(entry, "step") and hasattr(entry, "optimizer")
                if of_it and entry.optimizer is scheduler.optimizer and all(entry is not other for other in found):
                    found.append(entry)
                    waiting.append(entry)
    return found


def _run_ahead(target: _Target, scheduler: Any, ratios: list[float], steps: int, generators: Generators) -> Curve:
    """The rates of a copy from where the scheduler is, multiplied first; up to where the schedule ends."""
    generators.restore()
    try:
        copied, groups = _copied(target.optimizer, scheduler)
        _write(_rewritten(groups, _parts(copied), lambda value, _: float(value)))  # in double precision
        if ratios:
            _write(_rewritten(groups, _parts(copied), _multiplied(ratios)))
        metric = _metric(copied)
    except Exception as error:
        raise _refusal(target, scheduler, "cannot be run ahead on a copy") from error
    curve = [[float(group["lr"]) for group in groups]]
    for number in range(steps):
        try:
            copied.step(*metric)
        except Exception as error:
            if number and isinstance(error, ValueError):
                break  # OneCycleLR refuses steps after its last
            raise _refusal(target, scheduler, "cannot be run ahead on a copy") from error
        curve.append([float(group["lr"]) for group in groups])
    return curve


def _copied(optimizer: Optimizer, scheduler: Any) -> tuple[Any, list[Group]]:
    """A copy of the scheduler, and the groups that it writes."""
    stand_in = _StandIn(optimizer)
    memo: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    outer = scheduler.optimizer
    memo[id(outer)] = memo[id(optimizer)] = stand_in
    while outer is not optimizer:
        outer = outer.optimizer
        memo[id(outer)] = stand_in
    stand_in.param_groups = [
        {**copy.deepcopy({key: group[key] for key in group if key not in ("params", "param_names")}, memo),
         "params": stand_in.param_groups[0]["params"]}
        for group in optimizer.param_groups
    ]  # fmt: skip
    for part in _parts(scheduler):
        if hasattr(part, "_without_ensemble"):  # `hdet.OneCycleAutoLR`, whose ensemble cannot be copied
            part._without_ensemble(memo)
    copied = copy.deepcopy(scheduler, memo)
    if getattr(copied, "verbose", False) is True:
        copied.verbose = False
    return copied, stand_in.param_groups


def _metric(scheduler: Any) -> tuple[float, ...]:
    """What `step` must be given: a constant loss, or nothing."""
    parameters = inspect.signature(scheduler.step).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind in kinds]
    if not needed:
        return ()
    if len(needed) > 1 or needed[0] not in _METRICS:
        raise TypeError(f"step() needs {', '.join(needed)}")
    return (1.0,)


def _check_peak_seen(curve: Curve, length: _Length, name: str) -> None:
    """Raise if the rate may rise further than has been looked at."""
    if length.known or len(curve) <= length.steps:
        return
    for rates in zip(*curve, strict=True):
        if rates[-1] > max(rates[:-1]) * (1 + 1e-9):
            remedy = (
                "make the scheduler after the search, with found.rates"
                if length.steps == _MOST_STEPS
                else "write found.apply(optimizer, scheduler, steps=10_000), with the number of times that "
                "scheduler.step() is called in the run"
            )
            raise ValueError(f"{name} still raises the rate in step {length.steps}, so its peak is not known; {remedy}")


def _ratios(target: _Target, curve: Curve, name: str) -> list[float]:
    """What each group is multiplied by. A group that stays at 0 gets what another one gets."""
    ratios: list[float | None] = []
    for number, (found, *rates) in enumerate(zip(target.rates, *curve, strict=True)):
        peak = max(rates)
        where = f"parameter group {number} of optimizer {target.number}"
        if not all(map(math.isfinite, rates)):
            raise ValueError(
                f"{name} brings {where} to a rate that is not finite; write found.apply(optimizer, scheduler, "
                "steps=100), with the number of times that scheduler.step() is called in the run"
            )
        if peak <= 0 < found:
            raise ValueError(
                f"{name} must bring {where} to a positive rate, but its highest is {peak:g}; set its lr to "
                f"found.rates[{target.number}][{number}] before the scheduler is made, or write steps= with the "
                "number of times that scheduler.step() is called in the run"
            )
        ratios.append(found / peak if peak > 0 else None)
    known = next((ratio for ratio in ratios if ratio), 1.0)
    return [known if ratio is None else ratio for ratio in ratios]


def _differ(ratios: list[float]) -> bool:
    return not all(math.isclose(ratio, ratios[0], rel_tol=1e-9) for ratio in ratios)


def _multiplied(ratios: list[float]) -> NewValue:
    """A rate times its group's ratio. One rate for all groups stays as it is if their ratios differ."""
    common = 1.0 if _differ(ratios) else ratios[0]

    def new(value: Any, group: int | None) -> Any:
        ratio = common if group is None else ratios[group]
        return value if ratio == 1 or not math.isfinite(value) else value * ratio

    return new


def _rewritten(groups: list[Group], parts: list[Any], new: NewValue) -> list[Change]:
    """All rates of the groups and schedulers, made anew: groups may share one tensor."""
    changes: list[Change] = [
        (group, key, new(group[key], number))
        for number, group in enumerate(groups)
        for key in group
        if _RATE.search(key) and _is_number(group[key])
    ]
    for part in parts:
        for key, value in _held(part):
            if _is_number(value):
                changes.append((vars(part), key, new(value, None)))
            elif isinstance(value, (list, tuple)) and len(value) == len(groups) and all(map(_is_number, value)):
                several = [new(entry, number) for number, entry in enumerate(value)]
                changes.append((vars(part), key, several if isinstance(value, list) else tuple(several)))
    return changes


def _common(groups: list[Group], parts: list[Any]) -> Iterator[Any]:
    """The rates that are for all groups, such as `eta_min`."""
    return (value for part in parts for _, value in _held(part) if _is_number(value) and len(groups) > 1)


def _held(part: Any) -> Iterator[tuple[str, Any]]:
    """What a scheduler keeps under the name of a rate. The `eps` of ReduceLROnPlateau is a difference of rates."""
    plateau = "min_lrs" in vars(part)
    return ((key, value) for key, value in vars(part).items() if _RATE.search(key) or (plateau and key == "eps"))


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _put(lr: Any, rate: float) -> Any:
    return torch.full_like(lr, rate) if isinstance(lr, Tensor) else rate


def _reaches(curve: Curve, found: Sequence[float]) -> bool:
    """Whether the peaks are the found rates."""
    peaks = [max(rates) for rates in zip(*curve, strict=True)]
    return all(math.isclose(peak, rate, rel_tol=_CLOSE) for peak, rate in zip(peaks, found, strict=True))


def _keeps_shape(before: Curve, after: Curve, ratios: list[float]) -> bool:
    """Whether one curve is the other, times the ratios, to a part of the peak: floors are differences of roundings."""
    peaks = [max(rates) for rates in zip(*after, strict=True)]
    return len(before) == len(after) and all(
        abs(new - ratio * old) <= _CLOSE * peak
        for row, other in zip(before, after, strict=True)
        for old, new, ratio, peak in zip(row, other, ratios, peaks, strict=True)
    )


def _refusal(target: _Target, scheduler: Any, why: str) -> ValueError:
    name, rates = _name(scheduler), f"found.rates[{target.number}]"
    return ValueError(
        f"{name} {why}, so the found rate cannot be applied to it; everything is as it was. Make the scheduler after "
        f"the search, with {rates}: for example {name}(optimizer, max_lr=list({rates}), ...)"
    )


def _name(scheduler: Any) -> str:
    return type(scheduler).__name__


def _write(changes: list[Change]) -> None:
    for held, key, value in changes:
        held[key] = value
