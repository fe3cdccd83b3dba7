"""Warn about arguments that have no effect, or a surprising one, and say what to write instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from hdet._explore.hyperparameter import Hyperparameter
from hdet._explore.in_forward import InForward
from hdet._explore.in_groups import InGroups, is_rate
from hdet._options.averaging import Averaging
from hdet._user_warning import warn
from hdet.controllers import Controller, Fixed, LineSearch, Plan, Softmax

_warm_up_told = ContextVar("warm_up_told", default=False)


def warn_without_effect(controller: Controller, searches: bool, observe_only: bool, explores: bool) -> None:
    """Warn about arguments that change nothing; `searches` says whether the user asked for a line search."""
    name = type(controller).__name__
    problem = None
    if (controller.needs_score or searches) and not explores:
        problem = f"{name} has no effect, as nothing is explored: give a hyperparameter a spread"
    elif observe_only and isinstance(controller, Fixed):
        problem = "observe_only=True has no effect without a controller that moves something: pass one, or leave it out"
    if problem is not None:
        warn(problem)


@contextmanager
def warm_up_told() -> Iterator[None]:
    """Suppress the warning about an endless warm-up in this thread: the caller warns instead."""
    token = _warm_up_told.set(True)
    try:
        yield
    finally:
        _warm_up_told.reset(token)


def warn_of_warm_up(controller: Controller, explores: bool, interval: int, total_steps: int | None) -> None:
    """Warn about a controller that never acts because its warm-up is longer than the run."""
    if not (isinstance(controller, Softmax) and explores) or total_steps is None or _warm_up_told.get():
        return
    last = last_acting_step(interval, total_steps)
    if last == 0 or controller.warmup_steps > last:
        warn(
            f"{type(controller).__name__} never acts: the last round that it could act on ends at step {last}, before "
            f"its {controller.warmup_steps} warm-up steps are over; use a shorter warm-up or interval"
        )


def warn_of_probe(controller: Controller, probe: object, wants: Plan, local: bool, tail: float | None) -> None:
    """Warn about an unused probe, and about a line search whose replicas do not lie on a line."""
    problem = None
    if probe is not None and isinstance(controller, Fixed) and not tail:
        problem = "the probe costs time and Fixed does not read it: leave it out, or choose another controller"
    elif local and wants.needs_line:
        problem = (
            "the line search is for shared gradients: with local ones the replicas of a round do not lie on a line; "
            "use controller=hdet.controllers.Slope()"
        )
    if problem is not None:
        warn(problem)


def warn_of_bases(explored: Iterable[Hyperparameter]) -> None:
    """Warn about hyperparameters that multiplying cannot change, so that all replicas get the same value."""
    explored = list(explored)
    off: dict[str, list[bool]] = {}  # momenta and decays only: a rate of 0 may be the start of a schedule
    for h in explored:
        if isinstance(h, InGroups) and not is_rate(h):
            off.setdefault(h.place, []).extend(not h.steered(float(base)) for base in h.bases())
    for place, each in off.items():
        if all(each):
            warn(
                f"{place} is off or at its bound now in every parameter group, where every multiple of it is the same: "
                "it is not explored; begin with another value, or leave it out of the hyperparameters"
            )
    for h in explored:
        bases = [float(base) for base in h.bases()] if isinstance(h, InForward) else []
        if bases and not any(h.steered(base) for base in bases):
            warn(
                f"{h.name} is {bases[0]:g}, at its bound: in the {h.coordinate} coordinate every replica has the same "
                f'value, so it is not explored; begin within {h.bounds}, or write coordinate="linear"'
            )


def warn_of_two_replicas(controller: Controller, wants: Plan, names: Iterable[str], rates: Iterable[str]) -> None:
    """Warn if two replicas are too few: a search of one rate among several needs three, as the others move too."""
    searched = list(names if isinstance(controller, LineSearch) else rates)
    if wants.needs_line and len(searched) > 1:
        warn(
            f"a line search of each of {len(searched)} hyperparameters needs three replicas, and there are two: they "
            "stay where they are; explore one joint learning rate, use controller=hdet.controllers.Slope(), or start "
            "more replicas"
        )


def warn_of_outer_step(averaging: Averaging, interval: int, total_steps: int | None) -> None:
    """Warn about an outer step that is never taken."""
    if averaging.steps and total_steps is not None and interval >= total_steps:
        warn(
            f"outer_step={averaging.outer_step} has no effect: the only round, of {total_steps} steps, is the last "
            "one, and the last round's change is applied in full; use a shorter interval, for example 10"
        )


def warn_not_searched() -> None:
    """Warn that the learning rate should have been found before the first step."""
    warn(
        "Auto finds the learning rate before the first step in a long run or with one replica, but find_lr() was not "
        "called: call ensemble.find_lr(loader, loss_fn, scheduler=scheduler); or, if you know the rate, write "
        "controller=hdet.Auto(finds=False)"
    )


def last_acting_step(interval: int, total_steps: int) -> int:
    """The step that ends the last full round with a step after it; 0 if there is none."""
    return (total_steps - 1) // interval * interval
