"""The decisions of the two-stage range test: from loss curves to an interval of learning rates. Pure.

A curve is a list of (rate, loss on the probe after a step at that rate), the rates rising. `first` is the probe's loss
before the first step, L0. Losses count up to 1.5 L0, so do those that are not finite; centred means smooth them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Curve = list[tuple[float, float]]

_CAP = 1.5
_FALLEN = 0.99
_OUTER_STEPS = (0.5, 1.0)
_FACTORS = (1.0, 0.5)
_SPAN = 9.24  # of the logarithm of the rate, in the fine ramp
_SCORED = 0.16  # of it, between two scores
_GROWTH = 0.02  # of it, in a step of the slowest fine ramp
_STEEPEST = 4.0  # times that, for the shortest runs
_LONG = 8000  # steps of a run that is worth the slowest ramp
_WIDTH = 16.0  # of a valley that the slowest ramp has seen whole, as a ratio of rates


class Coarse:
    """80 steps from 1e-3 to 1e3 times the start: where the loss begins to fall."""

    steps = 80
    growth = math.log(1e6) / 79
    every = 4
    width = 3

    def ramp(self, start: float) -> list[tuple[int, float]]:
        """(index, rate) of each step. The rates lie on a grid that does not depend on the start, and each has its own
        index modulo `steps`: from whatever start, the ramp meets the same batches at the same rates, and is scored at
        the same ones, give or take rounding.

        >>> [(index, f"{rate:.2g}") for index, rate in Coarse().ramp(1.0)[:80:79]]
        [(40, '0.00092'), (39, '9.2e+02')]
        >>> [(index, f"{rate:.2g}") for index, rate in Coarse().ramp(1.3)[:80:79]]
        [(44, '0.0018'), (43, '1.8e+03')]
        """
        first = self.every * round(math.log(1e-3 * start) / (self.growth * self.every))
        return [(k % self.steps, math.exp(self.growth * k)) for k in range(first, first + 2 * self.steps)]

    def over(self, curve: Curve, first: float) -> bool:
        """Whether to stop: the loss is dead, or has fallen and, from `steps` on, the rate is 30 times the lowest's."""
        values = _certain(curve, first, self.width)
        if not values or is_dead(values, first):
            return bool(values)
        lowest = min(values)
        fallen = lowest < _FALLEN * first and curve[-1][0] >= 30 * curve[values.index(lowest)][0]
        return fallen and len(curve) * self.every >= self.steps

    def half_way(self, curve: Curve, first: float) -> float | None:
        """A: the first rate at which half of the whole drop is made; None if there is no drop. It is one of the scored
        ones, so that ramps from different starts end at the very same rate.

        >>> Coarse().half_way([(1.0, 4.0), (2.0, 3.0), (4.0, 2.0), (8.0, 1.0), (16.0, 1.0), (32.0, 1.0)], 4.0)
        4.0
        """
        values = smooth(curve, first, self.width)
        lowest = min(values, default=first)
        if not lowest < first:
            return None
        return next(rate for (rate, _), v in zip(curve, values, strict=True) if v <= (first + lowest) / 2)


class Fine:
    """From A/4 on, twice as fast up to A, some per cent more in each step: from where to where the loss is low.

    Args:
        total_steps: the length of the run to come. 8,000 and more are worth 2 % a step, so at most 428; 2,000 have half
            of that: the search is to cost a part of the run, and short runs want higher rates. None counts as long.

    Attributes:
        growth: of the rate's logarithm in a step, from A on.
        every: steps between two scores.
        valley: how wide an interval of low losses with an end counts at the least: 16-fold, 8-fold for 1,000 steps.

    >>> [(steps, round(fine.growth, 3), fine.every) for steps in (None, 8000, 2000) for fine in [Fine(steps)]]
    [(None, 0.02, 8), (8000, 0.02, 8), (2000, 0.04, 4)]
    >>> [round(Fine(steps).valley, 3) for steps in (None, 8000, 1000)]
    [16.0, 16.0, 8.0]
    """

    width = 3

    def __init__(self, total_steps: int | None = None) -> None:
        steep = 1.0 if total_steps is None else min(max(math.sqrt(_LONG / total_steps), 1.0), _STEEPEST)
        self.growth = _GROWTH * steep
        self.every = round(_SCORED / self.growth)
        self.valley = _WIDTH / steep ** (2 / 3)

    @property
    def scores(self) -> int:
        """How many a whole ramp has."""
        return len(self.ramp(1.0)) // self.every

    def ramp(self, half_way: float) -> list[tuple[int, float]]:
        """(index, rate) of each step.

        >>> rates = [rate for _, rate in Fine().ramp(4.0)]
        >>> len(rates), [round(math.log(rates[j]), 6) for j in (0, 35, 85)]
        (428, [0.0, 1.4, 2.4])
        """
        fast = math.ceil(math.log(4) / (2 * self.growth))  # steps up to A
        slow = round((_SPAN - math.log(4)) / self.growth)
        return [(j, half_way / 4 * math.exp(self.growth * (j + min(j, fast)))) for j in range(fast + slow)]

    def over(self, curve: Curve, first: float) -> bool:
        """Whether to stop: the loss is dead, or the rate is 4 times that of the lowest loss."""
        values = _certain(curve, first, self.width)
        if not values or is_dead(values, first):
            return bool(values)
        lowest = min(values)
        return lowest < _FALLEN * first and curve[-1][0] >= 4 * curve[values.index(lowest)][0]

    def began_too_high(self, curve: Curve) -> bool:
        """Whether the loss was dead before the rate had risen by 4: the first ramp was taken in by noise."""
        return curve[-1][0] < 4 * curve[0][0]

    def interval(self, curve: Curve, first: float) -> tuple[float, float] | None:
        """(lo, hi): the first rates with 90 % of the drop made, and with 10 % of it lost again, interpolated between
        the points; None without a drop.
        """
        values = smooth(curve, first, self.width)
        lowest = min(values, default=first)
        if not lowest < _FALLEN * first:
            return None
        edge = lowest + 0.1 * (first - lowest)
        at = values.index(lowest)
        low = next(k for k, v in enumerate(values) if v <= edge)
        high = next((k for k in range(at, len(values)) if values[k] > edge), None)
        last = curve[-1][0] if high is None else _crossing(curve, values, high, edge)
        return _crossing(curve, values, low, edge), last

    def whole(self, interval: tuple[float, float], last: float) -> tuple[float, float]:
        """The interval with the part of the valley that the ramp was too fast to see; `last` is its last rate.

        Where losses are low over a narrow range and then rise, they had not come down yet when the rates began to be
        too high: in a run they would have been low at lower rates too. So the low end goes down until the interval is
        `valley` wide. Where the ramp has ended before the losses rose, nothing says that the valley is narrow.

        >>> Fine().whole((0.2, 1.6), last=2.0), Fine().whole((0.05, 1.6), last=2.0), Fine().whole((0.2, 1.6), last=1.6)
        ((0.1, 1.6), (0.05, 1.6), (0.2, 1.6))
        """
        low, high = interval
        return interval if high >= last else (min(low, high / self.valley), high)


def smooth(curve: Curve, first: float, width: int) -> list[float]:
    """The centred means of `width` capped losses; of fewer at both ends.

    >>> smooth([(1.0, 2.0), (2.0, 1.0), (4.0, math.nan)], 2.0, 3)
    [1.5, 2.0, 2.0]
    """
    losses, half = capped(curve, first), width // 2
    parts = [losses[max(0, k - half) : k + half + 1] for k in range(len(losses))]
    return [sum(part) / len(part) for part in parts]


def capped(curve: Curve, first: float) -> list[float]:
    """The losses as far as they count."""
    return [min(loss, _CAP * first) if math.isfinite(loss) else _CAP * first for _, loss in curve]


def rises_for_good(curve: Curve, first: float, width: int = 3) -> float | None:
    """The rate from which on the loss is 1 % above the first one, interpolated; None if it ends below that.

    >>> round(rises_for_good([(1.0, 2.0), (2.0, 2.1), (4.0, 2.0), (16.0, 2.01), (64.0, 2.03)], 2.0, width=1), 6)
    32.0
    """
    values, edge = smooth(curve, first, width), (2 - _FALLEN) * first
    if not values or values[-1] < edge:
        return None
    below = [k for k, value in enumerate(values) if value < edge]
    return _crossing(curve, values, below[-1] + 1, edge) if below else curve[0][0]


def is_dead(values: Sequence[float], first: float) -> bool:
    """Whether the last loss is above the first one, or half of a real drop is lost again."""
    if not values:
        return False
    last, best = values[-1], min(values)
    return last > 1.02 * first or (best < 0.95 * first and last > best + 0.5 * (first - best))


def default_factor(outer_step: float, fine: Fine, sgd_width: float = 1.0) -> float:
    """What sqrt(lo hi) is multiplied by: 0.5, 1.0 with an outer step of 1/2 or less, geometric between. A steeper ramp
    lives through rates that are higher in proportion; the root of that is taken back.

    Args:
        outer_step: that of the run to come.
        fine: the ramp.
        sgd_width: with SGD, hi / lo. Where that is as wide as the valley of the ramp it is 1.0, 0.5 from its root
            downwards, geometric between. With SGD half of the middle of a wide valley was 2 to 6 times below the best
            rate of a long run: docs/research.md, "SGD in wide valleys".

    >>> default_factor(1.0, Fine()), default_factor(0.5, Fine()), round(default_factor(0.75, Fine()), 3)
    (0.5, 1.0, 0.707)
    >>> round(default_factor(1.0, Fine(2000)), 3)
    0.354
    >>> [round(default_factor(1.0, Fine(), width), 3) for width in (4.0, 8.0, 16.0, 100.0)]
    [0.5, 0.707, 1.0, 1.0]
    """
    (low, high), (widest, plain) = _OUTER_STEPS, _FACTORS
    wide = min(max(2 * math.log(sgd_width) / math.log(fine.valley) - 1, 0.0), 1.0)
    part = (max(outer_step, low) - low) / (high - low) * (1 - wide)
    return float(widest ** (1 - part) * plain**part * math.sqrt(_GROWTH / fine.growth))


def _crossing(curve: Curve, values: Sequence[float], after: int, edge: float) -> float:
    """The rate at which the losses cross `edge` on their way to the point `after`, on a line in the rate's logarithm.

    >>> round(_crossing([(1.0, 3.0), (4.0, 1.0)], [3.0, 1.0], 1, 2.0), 9)
    2.0
    """
    if after == 0:
        return curve[0][0]
    before = after - 1
    part = (values[before] - edge) / (values[before] - values[after])
    return float(curve[before][0] ** (1 - part) * curve[after][0] ** part)


def _certain(curve: Curve, first: float, width: int) -> list[float]:
    """The smoothed losses that later points do not change."""
    return smooth(curve, first, width)[: max(0, len(curve) - width // 2)]
