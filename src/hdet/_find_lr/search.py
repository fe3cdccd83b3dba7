"""The search: a two-stage range test, everything put back afterwards.

The decisions are in `decisions.py`, the steps in `trial.py`, and what they train and score in `workload.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import SGD, Optimizer

from hdet._arguments import Rule, check_number
from hdet._find_lr.decisions import Coarse, Curve, Fine, default_factor
from hdet._find_lr.doubts import doubts
from hdet._find_lr.found_rate import FoundRate
from hdet._find_lr.interrupts import deferred_interrupts
from hdet._find_lr.no_rate import FindLRError, no_rate
from hdet._find_lr.progress import ProgressLine
from hdet._find_lr.trial import Trial
from hdet._find_lr.workload import Workload
from hdet._replicas import Where, find_replicas
from hdet._replicas.fingerprint import Claims, fingerprint
from hdet._user_warning import warn

LOWER = (1, 16, 256)  # where the second ramp begins, if the loss is dead at once


class Search:
    """One search: what is trained and scored, and how long the training to come is.

    Args:
        model, optimizers, total_steps, outer_step, factor, also, replicas, progress: as in `find_lr`.
        work: what is trained and scored.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        work: Workload,
        total_steps: int | None = None,
        outer_step: float = 1.0,
        factor: float | None = None,
        also: Sequence[Any] = (),
        replicas: Where | None = None,
        progress: bool = True,
    ) -> None:
        self._factor = _check_factors(outer_step, factor)
        self._outer_step, self._total_steps = outer_step, total_steps
        self._fine = Fine(total_steps)
        self._model, self._optimizers, self._work = model, list(optimizers), work
        self._everyone = find_replicas(replicas)
        most = Coarse.steps + len(self._fine.ramp(1.0))
        self._line = ProgressLine(most, shown=progress and self._everyone.ranks.rank == 0)
        self._trial = Trial(model, self._optimizers, work, also, self._everyone, self._line.show)

    def claims(self, given: dict[str, Any]) -> Claims:
        """What must be the same on all replicas."""
        told = {"total_steps": self._total_steps, "outer_step": self._outer_step, "factor": self._factor, **given}
        return fingerprint(told, self._optimizers, self._model)

    def run(self) -> FoundRate:
        """What is found. Everything is put back."""
        trial, everyone = self._trial, self._everyone
        everyone.arrive("hdet.find_lr")
        try:
            trial.require_agreement()
            trial.prepare()
            sgd = all(type(entry) is SGD for entry in self._optimizers)  # others may normalise their steps
            found = _find(trial, self._fine, partial(self._factor_of, sgd), self._total_steps)
        except FindLRError:
            raise
        except Exception as error:
            lost = everyone.explain(error, trial.stepped_at, trial.wrappers)
            if lost is None:
                raise
            raise lost from error
        finally:
            with deferred_interrupts():
                trial.restore()
                everyone.close()
                self._line.close()
        if not found.sure:
            warn(
                f"the learning rate that was found, {found.rate:.3g}, is not sure: {'; '.join(found.doubts)}. Compare "
                "short runs at 0.1, 1 and 10 times it"
            )
        return found

    def _factor_of(self, sgd: bool, width: float) -> float:
        return self._factor or default_factor(self._outer_step, self._fine, sgd_width=width if sgd else 1.0)


def _find(trial: Trial, fine: Fine, factor_of: Callable[[float], float], total_steps: int | None) -> FoundRate:
    started = time.perf_counter()
    start = trial.start
    trial.rewind()
    first = trial.score()
    if not (math.isfinite(first) and first > 0):
        raise FindLRError(
            f"the probe's loss at the initial weights must be positive and finite, got {first}; check the weights and "
            "the probe's loss_fn, and add a constant to a loss that can be negative"
        )
    coarse = Coarse()
    first_curve = _ramp(trial, coarse, start, first)
    half_way = coarse.half_way(first_curve, first)
    if half_way is None:
        raise no_rate(trial, first, [first_curve])
    for lower in LOWER:
        second_curve = _ramp(trial, fine, half_way / lower, first)
        interval = fine.interval(second_curve, first)
        if interval is not None or not fine.began_too_high(second_curve):
            break
    if interval is None:
        raise no_rate(trial, first, [first_curve, second_curve])
    low, high = whole = fine.whole(interval, second_curve[-1][0])
    factor = factor_of(interval[1] / interval[0])
    rate = factor * math.sqrt(low * high)
    seconds, stepping, probing = trial.clocks(time.perf_counter() - started, trial.step_seconds, trial.probe_seconds)
    return FoundRate(
        rate=rate,
        scale=rate / start,
        rates=tuple(tuple(value * rate / start for value in values) for values in trial.references),
        interval=interval,
        whole=whole,
        factor=factor,
        first_loss=first,
        coarse=first_curve,
        fine=second_curve,
        steps=trial.steps,
        samples=trial.samples,
        cost=trial.steps * (1 + probing / stepping),
        seconds=seconds,
        doubts=(*trial.doubts, *doubts(first, first_curve, second_curve, fine, interval)),
        total_steps=total_steps,
        sizes=trial.sizes,
    )


def _ramp(trial: Trial, stage: Coarse | Fine, start: float, first: float) -> Curve:
    """The curve of a ramp from `start` on.

    Raises:
        FindLRError: if a batch's gradient is not finite at any rate: what follows would count as a rate too high.
    """
    curve = trial.ramp(stage.ramp(start), stage.every, lambda curve: stage.over(curve, first))
    bad = trial.bad_batch()
    if bad is not None:
        raise FindLRError(
            f"batch {bad} gives a gradient that is not finite, at the initial weights too; check the data and the loss "
            "of that batch, or leave it out"
        )
    return curve


def _check_factors(outer_step: float, factor: float | None) -> float | None:
    check_number("outer_step", outer_step, Rule(lambda x: 0 < x <= 1, "lie in (0, 1]", "outer_step=0.5"))
    if factor is None:
        return None
    check_number("factor", factor, Rule(lambda x: 0 < x < math.inf, "be positive and finite", "factor=0.5"))
    return float(factor)
