"""Find the learning rate before the run: a two-stage range test, everything put back afterwards.

The decisions are in `hdet._find_lr.decisions`, the steps in `hdet._find_lr.trial`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import LBFGS, SGD, Optimizer

from hdet._arguments import Rule, answers, check_count, check_number
from hdet._find_lr.decisions import Coarse, Curve, Fine, default_factor
from hdet._find_lr.doubts import doubts
from hdet._find_lr.found_rate import FoundRate
from hdet._find_lr.interrupts import deferred_interrupts
from hdet._find_lr.no_rate import FindLRError, no_rate
from hdet._find_lr.trial import Bench
from hdet._hooks import unwrap
from hdet._probe.probe import Probe
from hdet._replicas import Where, find_replicas
from hdet._replicas.agreement import Agreement, claim
from hdet._replicas.fingerprint import fingerprint
from hdet._tensors.deepspeed import check_deepspeed
from hdet._user_warning import warn

LOWER = (1, 16, 256)  # where the second ramp begins, if the loss is dead at once


@answers("hdet.find_lr", {"process_group": "replicas=process_group", "mesh": "replicas=mesh"})
def find_lr(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    step_fn: Callable[[int], Any],
    *,
    probe: Probe,
    total_steps: int | None = None,
    outer_step: float = 1.0,
    factor: float | None = None,
    also: Sequence[Any] = (),
    replicas: Where | None = None,
) -> FoundRate:
    """The learning rate to train with, found in a few hundred steps from the initial weights, nearly whatever rate
    the optimizer has now. Collective: call it on every replica, before training and before `warm_init`.

    Two ramps of rising rates, each from the weights as they are and without optimizer state, are scored on one probe:
    the coarse one from 1e-3 times the present rate upwards finds where the loss begins to fall, the fine one the
    interval [lo, hi] in which it is low. The answer is factor * sqrt(lo hi). If losses are low over less than a 16-fold
    range and then rise, the ramp was too fast to see all of that range: it counts as 16-fold, with a lower lo. All
    groups are scaled alike.

    Afterwards weights, buffers, gradients, modes, optimizer state, groups, hooks and random generators are bit for bit
    as before, also after an exception. Meanwhile that costs a copy of the trained weights and buffers, a second
    optimizer state, and for the first ramp a copy of frozen weights on the host; that of those which a forward pass
    changes (a momentum encoder) is kept. A buffer that a forward pass makes or grows (a table of positions) stays.

    The present rate of a group is its "max_lr" if a schedule such as OneCycleLR has put one there, then its
    "initial_lr", then its "lr", so that the answer is a peak; OneCycleLR's momentum is the one it has at the peak.
    GradScaler is not supported, nor is LBFGS.

    Args:
        model: the model that is trained, wrapped in DistributedDataParallel where there are several replicas.
        optimizer: its optimizer, or several of them.
        step_fn: `step_fn(index)`: forward and backward pass of this replica's training batch `index`, through the
            wrapped model. The index lies in 0..427; the coarse ramp begins anywhere in 0..79 and goes round. The same
            batch for the same index gives the same answer from every start. Gradients are cleared and the optimizer
            steps here.
        probe: what the weights are scored on; about four global batches. An iterable as its data moves on by one probe.
        total_steps: the length of the training to come. For 2,000 steps the fine ramp has half as many steps as for
            8,000 and more, and as many scores, and a narrow range counts as 10-fold; None is taken for long.
        outer_step: that of the training to come; a half allows higher rates.
        factor: on sqrt(lo hi); by default 0.5, 1.0 with an outer step of 1/2 and with SGD whose losses are low over as
            wide a range as a narrow one counts for, and less for less than 8,000 steps.
        also: further objects with `state_dict()` and `load_state_dict()` that steps change, such as samplers.
        replicas: who they are, as in `hdet.Ensemble`: a process group or a device mesh; by default all ranks.

    Warns if something speaks against the answer; `FoundRate.doubts` says what.

    Raises:
        FindLRError: if the probe's loss is not finite or not positive, or does not fall at any rate.
        ValueError: if the replicas hold different weights or rates.
        LostReplicaError: if another replica has failed; what it raised is quoted.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> x, y = torch.eye(2), torch.tensor([[3.0], [5.0]])
    >>> def loss_fn(model, batch):
    ...     return nn.functional.mse_loss(model(batch[0]), batch[1])
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    >>> found = find_lr(model, optimizer, lambda index: loss_fn(model, (x, y)).backward(),
    ...                 probe=Probe(lambda index: [(x, y)], loss_fn))
    >>> 0.03 < found.rate < 3
    True
    """
    with Agreement("hdet.find_lr", replicas):
        if total_steps is not None:
            check_count("total_steps", total_steps)
        fine = Fine(total_steps)
        factor = _check_factors(outer_step, factor)
        check_deepspeed(optimizer, model)
        optimizers = _optimizers(optimizer)
        _check(probe, step_fn, also)
        everyone = find_replicas(replicas)
        bench = Bench(model, optimizers, step_fn, probe, also, everyone)
        given = {"total_steps": total_steps, "outer_step": outer_step, "factor": factor, "probe": probe}
        claim(fingerprint(given, optimizers, model))
    everyone.arrive("hdet.find_lr")
    try:
        bench.require_agreement()
        sgd = all(type(entry) is SGD for entry in optimizers)  # others may normalise their steps
        found = _find(
            bench, fine, lambda width: factor or default_factor(outer_step, fine, sgd_width=width if sgd else 1.0)
        )
    except FindLRError:
        raise
    except Exception as error:
        lost = everyone.explain(error, bench.stepped_at, bench.wrappers)
        if lost is None:
            raise
        raise lost from error
    finally:
        with deferred_interrupts():
            bench.restore()
            everyone.close()
    if not found.sure:
        warn(
            f"the learning rate that was found, {found.rate:.3g}, is not sure: {'; '.join(found.doubts)}. Compare "
            "short runs at 0.1, 1 and 10 times it"
        )
    return found


def _find(bench: Bench, fine: Fine, factor_of: Callable[[float], float]) -> FoundRate:
    started = time.perf_counter()
    start = bench.start
    bench.rewind()
    first = bench.score()
    if not (math.isfinite(first) and first > 0):
        raise FindLRError(
            f"the probe's loss at the initial weights must be positive and finite, got {first}; check the weights and "
            "the probe's loss_fn, and add a constant to a loss that can be negative"
        )
    coarse = Coarse()
    first_curve = _ramp(bench, coarse, start, first)
    half_way = coarse.half_way(first_curve, first)
    if half_way is None:
        raise no_rate(bench, first, [first_curve])
    for lower in LOWER:
        second_curve = _ramp(bench, fine, half_way / lower, first)
        interval = fine.interval(second_curve, first)
        if interval is not None or not fine.began_too_high(second_curve):
            break
    if interval is None:
        raise no_rate(bench, first, [first_curve, second_curve])
    low, high = whole = fine.whole(interval, second_curve[-1][0])
    factor = factor_of(interval[1] / interval[0])
    rate = factor * math.sqrt(low * high)
    seconds, stepping, probing = bench.clocks(time.perf_counter() - started, bench.step_seconds, bench.probe_seconds)
    return FoundRate(
        rate=rate,
        scale=rate / start,
        rates=tuple(tuple(value * rate / start for value in values) for values in bench.references),
        interval=interval,
        whole=whole,
        factor=factor,
        first_loss=first,
        coarse=first_curve,
        fine=second_curve,
        steps=bench.steps,
        samples=bench.samples,
        cost=bench.steps * (1 + probing / stepping),
        seconds=seconds,
        doubts=doubts(first, first_curve, second_curve, fine, interval),
    )


def _ramp(bench: Bench, stage: Coarse | Fine, start: float, first: float) -> Curve:
    """The curve of a ramp from `start` on.

    Raises:
        FindLRError: if a batch's gradient is not finite at any rate: what follows would count as a rate too high.
    """
    curve = bench.ramp(stage.ramp(start), stage.every, lambda curve: stage.over(curve, first))
    bad = bench.bad_batch()
    if bad is not None:
        raise FindLRError(
            f"batch {bad} gives a gradient that is not finite, at the initial weights too; check the data and the loss "
            "of that batch, or leave it out in step_fn"
        )
    return curve


def _optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not given:
        raise ValueError("optimizer must be an optimizer or several of them, got an empty list")
    found = [unwrap(entry) for entry in given]
    if any(isinstance(entry, LBFGS) for entry in found):
        raise ValueError("optimizer must not be LBFGS, which needs a closure; it has a line search of its own")
    return found


def _check_factors(outer_step: float, factor: float | None) -> float | None:
    check_number("outer_step", outer_step, Rule(lambda x: 0 < x <= 1, "lie in (0, 1]", "outer_step=0.5"))
    if factor is None:
        return None
    check_number("factor", factor, Rule(lambda x: 0 < x < math.inf, "be positive and finite", "factor=0.5"))
    return float(factor)


def _check(probe: object, step_fn: object, also: Sequence[Any]) -> None:
    if not isinstance(probe, Probe):
        raise TypeError(f"probe must be an hdet.Probe, got {type(probe).__name__}; write Probe(data, loss_fn)")
    if not callable(step_fn):
        raise TypeError(f"step_fn must be a function of the batch's index, got {step_fn!r}")
    for entry in also:
        if not (hasattr(entry, "state_dict") and hasattr(entry, "load_state_dict")):
            raise TypeError(f"also must hold objects with state_dict and load_state_dict, got {type(entry).__name__}")
