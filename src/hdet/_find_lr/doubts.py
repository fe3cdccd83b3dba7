"""What speaks against the rate that a search has found, in words. Pure; curves are those of `decisions.py`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from hdet._find_lr.decisions import Coarse, Curve, Fine, capped, smooth

_LEAST_FALL = 0.05  # of the first loss
_LEAST_SIGNAL = 5.0  # times the scatter of the scores
_FEWEST = 8  # bends that tell of it
_MUCH_FURTHER = 2.0  # times the fall in the second ramp


def doubts(first: float, coarse: Curve, fine: Curve, stage: Fine, interval: tuple[float, float]) -> tuple[str, ...]:
    """Why the answer may be wrong, as short sentences; empty where nothing speaks against it.

    - The loss has fallen by little of its first value. On a plateau that may be its mean only, and what is to be
      learned wants another rate.
    - It has fallen by little more than what the scores scatter by.
    - The first ramp has seen it fall much further, at higher rates.
    - The interval begins or ends where the second ramp does.

    Args:
        first: the loss before the first step.
        coarse: the first ramp's curve.
        fine: the second one's.
        stage: the second ramp.
        interval: the rates between which losses were low, found in `fine`.

    >>> steady = [(1.0, 2.0), (2.0, 1.5), (4.0, 1.0), (8.0, 1.0), (16.0, 2.2)]
    >>> doubts(2.0, steady, steady, Fine(), (3.0, 12.0))
    ()
    >>> small = [(rate, 1.98 + loss / 100) for rate, loss in steady]
    >>> doubts(2.0, small, small, Fine(), (3.0, 12.0))
    ('the loss fell by only 0.4 %, from 2 to 1.99167',)
    """
    values = smooth(fine, first, stage.width)
    lowest = min(values)
    fall, said = first - lowest, []
    if fall < _LEAST_FALL * first:
        said.append(f"the loss fell by only {100 * fall / first:.1f} %, from {first:.6g} to {lowest:.6g}")
    noise = scatter([first, *capped(fine, first)[: values.index(lowest) + 2]])
    if fall < _LEAST_SIGNAL * noise:
        said.append(f"the loss fell by only {fall / noise:.1f} times what its scores scatter by")
    before = smooth(coarse, first, Coarse.width)
    deepest, rate = min(before), coarse[before.index(min(before))][0]
    if first - deepest > _MUCH_FURTHER * fall and rate > interval[1]:
        said.append(
            f"in the first ramp the loss fell further, by {100 * (first - deepest) / first:.1f} %, at higher rates, "
            f"about {rate:.3g}"
        )
    if interval[0] <= fine[0][0]:
        said.append(f"the loss was low from the lowest rate of the second ramp on, {fine[0][0]:.3g}")
    if interval[1] >= fine[-1][0] and len(fine) >= stage.scores:
        said.append(f"the loss was still low where the second ramp ended, at {fine[-1][0]:.3g}")
    return tuple(said)


def scatter(losses: Sequence[float]) -> float:
    """The standard deviation of a score about the line through its neighbours, on the scale of a single score.

    By the median, so that one jump counts little; a smooth fall bends little from one score to the next. A fall within
    a few scores is all bends: 0 if there are too few to tell.

    >>> scatter([3.0, 2.0, 1.0, 0.0]), round(scatter([0.0, 1.0] * 8), 3)
    (0.0, 1.211)
    """
    bends = [abs(a - 2 * b + c) for a, b, c in zip(losses, losses[1:], losses[2:], strict=False)]
    return statistics.median(bends) / 0.6745 / math.sqrt(6) if len(bends) >= _FEWEST else 0.0
