"""Whether a run learns: compares current losses with the first. Pure, as controllers are: floats on the host."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_SURE = 3.0  # standard errors
_PAID_BACK = 1 / 10  # after a rise, a run counts as learning only once it has fallen by this part of the rise
_MOST_NOISE = 1 / 12  # of the first loss, each error: a fall by 36 % always counts
_TOO_NOISY = 1 / 10  # of the first loss
_LOST = 0.9  # of what was gained
_EXPLODED = 10.0  # a rise by this many times the usual loss is never noise
_CLEARLY_MORE = 2.0  # the same if the noise is unknown
_ROUNDING = 1e-6  # least noise, relative to the first loss: single precision
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 32
_LOOKED_AT = 10  # rounds that the noise is estimated from, or two more than the level has if that is more
_LEAST_BENDS = 4  # second differences needed to estimate the noise
_WINDOW, _AFTER = 100, 1000  # steps, in runs of unknown length


class Trend(NamedTuple):
    """How the losses changed since the start; the fields of the same names in `hdet.records.RoundRecord`."""

    trend: str = ""
    first_loss: float | None = None
    level: float | None = None
    lowest: float | None = None
    highest: float | None = None

    @property
    def shows_nothing(self) -> bool:
        """Whether the losses are no lower than at the start, even if it is too early or too noisy to say why."""
        return self.level is not None and self.first_loss is not None and self.level >= self.first_loss


class Descent:
    """Follows the mean losses of the rounds, over all replicas, or this one's if nothing is gathered.

    The start is the loss of the run's first step, that of the initial weights: if the rate is too high, the loss is
    another one a few steps later. The level is the median of the last tenth of the run (at least one round, at most
    half of them and 32), so one odd round does not count. With s the standard error of a round of T steps, estimated
    from second differences between rounds, and k rounds in the level::

        level < start - 3 e,   e^2 = T s^2 + 1.6 s^2 / k                    "falls"
        else: some level was as low, and 9/10 of what it gained are lost   "back", if less "falls"
              some level was as much above the start                       "risen"
              neither                                                      "flat"

    The trend stays empty if 3 e is more than a tenth of the start, because the first step is too noisy, and if losses
    are not positive, as for policies or likelihoods, because fractions of them mean nothing.

    After so clear a rise, a fall counts only if it is at least a tenth of the rise, or of the start if that is less: a
    dead network outputs a constant, whose loss is often slightly below that of the initial weights.

    Downwards each part of e is limited to 1/12 of the start, but not for "back"; upwards 3 e is limited to 10 times the
    start, or to the lowest level if that is more. The trend stays empty until half of the run is over, or a quarter if
    that is 1,000 steps or more: by then a warm-up has ended, and stopping a lost run still saves much of its cost.

    Args:
        total_steps: optimizer steps of the whole run, if known.

    Attributes:
        said: whether the user was warned that the losses have not fallen.
    """

    def __init__(self, total_steps: int | None) -> None:
        self._window = _WINDOW if total_steps is None else total_steps / 10
        self._due = _AFTER if total_steps is None else max(total_steps / 4, min(total_steps / 2, _AFTER))
        self.said = False
        self.reset()

    def reset(self) -> None:
        """Start over: the trend stays empty until `update` receives a first loss."""
        self._first: float | None = None
        self._recent: list[float] = []
        self._rounds = 0
        self._lowest: float | None = None
        self._highest: float | None = None
        self.said = False

    def update(self, loss: float, steps: int, first: float | None) -> None:
        """Add a round of `steps` steps with this mean loss, and `first`, the loss of the run's first step, if that was
        in this round. Losses that are not finite are left out.
        """
        if first is not None and math.isfinite(first):
            self._first = first
        if not math.isfinite(loss) or steps < 1:
            return
        self._rounds += 1
        self._recent = [*self._recent, loss][-_MOST_ROUNDS:]
        most = max(_LEAST_ROUNDS, math.ceil(self._window / steps))
        self._taken = max(1, min(most, self._rounds // 2, len(self._recent)))
        level = statistics.median_low(self._recent[-self._taken :])
        self._level, self._steps = level, steps
        self._highest = level if self._highest is None else max(level, self._highest)
        if self._rounds >= _LEAST_ROUNDS:
            self._lowest = level if self._lowest is None else min(level, self._lowest)

    def go_back(self) -> None:
        """Note a return to the weights of an earlier round, whose level is unknown."""
        self._recent = []

    def trend(self, step: int, last: bool = False) -> Trend:
        """The trend at this step; `last` says whether it is the run's last."""
        first, lowest, highest = self._first, self._lowest, self._highest
        if first is None or not self._recent or lowest is None or highest is None:
            return Trend()
        told = Trend("", first, self._level, lowest, highest)
        if step < self._due and not last:
            return told
        return told._replace(trend=self._compared(first, lowest, highest))

    def _compared(self, first: float, lowest: float, highest: float) -> str:
        below, sure, above = self._margins(first)
        if highest > first + above:
            below = max(below, _PAID_BACK * min(highest - first, abs(first)))
        if self._level < first - below:
            return "falls"
        if min(first, lowest) <= 0:
            return ""
        if lowest < first - max(below, sure):
            return "back" if (self._level - lowest) / (first - lowest) > _LOST else "falls"
        if highest > first + above:
            return "risen"
        return "" if below > _TOO_NOISY * first and self._level < first else "flat"

    def state_dict(self) -> dict[str, Any]:
        """All that cannot be recomputed, as plain numbers."""
        return {name: getattr(self, f"_{name}", None) for name in _SAVED} | {"said": self.said}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Resume from `state_dict()`; with None the start stays unknown."""
        self.reset()
        if state is None:
            return
        for name in _SAVED:
            if state[name] is not None:
                setattr(self, f"_{name}", state[name])
        self._recent, self.said = list(self._recent), bool(state["said"])

    def _margins(self, first: float) -> tuple[float, float, float]:
        """The distances from the start that exceed noise: below it, below it for "back", and above it."""
        size, noise = abs(first), _noise(self._recent[-max(_LOOKED_AT, self._taken + 2) :])
        errors = (noise * math.sqrt(self._steps), 1.25 * noise / math.sqrt(self._taken))
        sure, known = _SURE * math.hypot(*errors), noise < math.inf
        below = _SURE * math.hypot(*(min(error, _MOST_NOISE * size) for error in errors))
        usual = max(size, min(self._recent[0], self._lowest or 0.0))
        above = min(sure, (_EXPLODED if known else _CLEARLY_MORE) * usual)
        least = _ROUNDING * size
        return max(below, least), sure if known else 0.0, max(above, least)


_SAVED = ("first", "recent", "rounds", "lowest", "highest", "level", "steps", "taken")


def words(told: Trend) -> str:
    """The problem that a trend shows and what to do about it; empty if there is none.

    >>> words(Trend("back", 2.31, 2.3, 0.5, 2.4))[:79]
    'the losses are back where they began (2.31 at the start, 0.5 at best, 2.3 now):'
    """
    lower = (told.level or 0.0) < (told.first_loss or 0.0)
    first, level, lowest, highest = (f"{x:.4g}" if x is not None else "?" for x in told[1:])
    if told.trend == "back":
        return (
            f"the losses are back where they began ({first} at the start, {lowest} at best, {level} now): if the "
            "data are still the same, start at a tenth of the learning rate, or write safety=hdet.Safety(rollback=True)"
        )
    if told.trend == "risen":
        fallen = "hardly fallen" if lower else "not fallen"
        between = "" if level == highest else f", {highest} in between"
        return (
            f"the losses have {fallen} since the start ({first} then, {level} now{between}): unless they are "
            "meant to rise, the learning rate is likely too high; run hdet.find_lr, or start at a tenth of it"
        )
    if told.trend == "flat":
        noisy = " by more than their noise" if lower else ""
        return (
            f"the losses have not fallen since the start{noisy} ({first} then, {level} now): the learning rate may be "
            "too high or too low, or little is left to learn; run hdet.find_lr"
        )
    return ""


def _noise(losses: Sequence[float]) -> float:
    """The standard error of one round, from the median second difference; inf if there are too few."""
    bends = [abs(a - 2 * b + c) for a, b, c in zip(losses, losses[1:], losses[2:], strict=False)]
    return math.inf if len(bends) < _LEAST_BENDS else 0.605 * statistics.median(bends)
