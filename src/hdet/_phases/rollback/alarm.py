"""When a run has diverged (`Alarm`), and how it goes back (`Keeper`). What to go back to: `snapshot.py`.

The alarm is pure, as controllers are: float64 on the host, the same losses on every replica, so the same verdict on
every replica, without traffic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hdet._arguments import check_count
from hdet._options.safety import Rollback
from hdet._probe.score import typical
from hdet._replicas import Replicas
from hdet._tensors.finite import finite
from hdet._tensors.snapshot import Snapshot

Verdict = Literal["ok", "best", "alarm"]

# What is gained or given back by fewer standard errors is taken for noise. With 6 of them, noise that lasts for several
# rounds (a correlation of 1/2 between rounds of 100 steps) raised false alarms in 2-4 % of runs; with 8 in none of 300.
_STANDS_OUT = 8.0
_AT_FIRST = 1 / 32  # of the start, until the noise is known: 8 of them are a quarter
_LEAST_BENDS = 4  # second differences, of six half windows in a row, that it is known from
_FEW = 8.0  # bends may be small by chance: the noise is (1 + 8 / bends) times what they say
_NOISE_BENDS = 30  # that it is averaged over
_ODD = 1 / 4  # of the gain: with as much as the gain, two odd rounds within four raised alarms, with this none
_ROUNDING = 1e-6  # of the loss, at least, is noise: single precision

_FRESH = dict.fromkeys(
    ("steps", "rounds", "loss", "sum", "weight", "level", "block_sum", "block_steps", "blocks", "last", "before"), 0.0
)
_KEPT = dict.fromkeys(("noise", "noise_weight", "bends", "started", "start", "best", "error", "unsaved", "alarms"), 0.0)


@dataclass(frozen=True)
class Alarm:
    """Tells when a run has given back more than half of what it had gained, or its loss is not finite.

    The mean training loss of each round goes into an exponential mean L over `window` steps, in which a round of T
    steps weighs as T steps. From `window` steps on::

        start = L over the first tenth of a window     best = the lowest L     e = the noise in L
        alarm:   start - best > 8 e   and   L - best > max((start - best) / 2, 8 e)

    L is taken of two rounds in a row, the higher for `best` and the lower for the alarm: one odd round is neither. Nor
    does it stay in L: a round that is worse than the start, or than L if that is higher, by more than a quarter of the
    gain and by more than 8 e counts for no more than that, unless the round before was as bad. (In the first window a
    round counts for at most twice the start.) One that is far below what was seen, by the start or the gain, counts for
    no less than that, unless the round before was as low. A loss that is not finite is an alarm at once. After an alarm
    L begins anew, and for `window` steps there is no other but that one; start and best stay.

    The start is the mean of the first steps, ten of them with the default window, and so about the loss of an untrained
    model. A whole window would be too many: a run with a rate that is too high often learns, and is lost again, within
    two or three, and would seem to have gained nothing. One step would be too few: one bad batch would set the level.
    A start that is too high only makes the alarm late. `best` begins at the end of the first window.

    The noise e is that of means over half a window (or a round, if that is longer), whose second differences tell it
    apart from a steady rise or fall. It leaves out the first window, is known six of them later, and is taken for 1/32
    of `start` until then. It is not updated while L stands out from the best: what goes wrong is not to count as noise.

    A run that has not gained anything that stands out of the noise has nothing to give back: there is no alarm as long
    as its loss is finite. So a run that climbs from its first step on to a finite height is not noticed.

    Args:
        window: how many steps are averaged over. Too few raise false alarms, more so with small batches.
        every: at least so many steps lie between two verdicts "best", each of which has a snapshot taken.
    """

    window: int = 100
    every: int = 100

    def __post_init__(self) -> None:
        check_count("window", self.window)
        check_count("every", self.every)

    @property
    def early(self) -> int:
        """How many first steps of a run `start` is the mean of."""
        return early_steps(self.window)

    def init(self) -> dict[str, float]:
        """The state before the first round: plain floats, to be saved as they are."""
        return {**_FRESH, **_KEPT, "unsaved": float(self.every)}

    def update(
        self, state: Mapping[str, float], loss: float, steps: int, early: float | None = None
    ) -> tuple[dict[str, float], Verdict]:
        """The state after a round of `steps` steps with this mean loss, and what to do. `state` is left as it is.

        Args:
            state: that of the last round.
            loss: the mean over the round.
            steps: of the round.
            early: the mean over its first steps, `self.early` of them: the start, if it is the first round; without
                it the start of a run with longer rounds is the mean of a whole one.

        Returns:
            "best": the lowest L so far, and at least `every` steps since the last one that was: save. The first round
            is one, so that there is something to go back to from the second round on.
            "alarm": go back. The state that comes with it is that of a run which has.
        """
        if not math.isfinite(loss):
            return _gone_back(state), "alarm"
        new = self._smooth(state, loss, steps)
        if not new["started"]:
            return self._first_window(new, steps, early)
        if new["steps"] < self.window or new["rounds"] < 2:
            return new, "ok"
        high, low = min(new["level"], state["level"]), max(new["level"], state["level"])
        lowest = low < new["best"]
        new["best"] = min(low, new["best"])
        if new["bends"] >= _LEAST_BENDS and low - new["best"] <= _STANDS_OUT * new["error"]:
            new["error"] = _error(new)
        gained, margin = new["start"] - new["best"], _STANDS_OUT * new["error"]
        if gained > margin and high - new["best"] > max(gained / 2, margin):
            return _gone_back(new), "alarm"
        return self._verdict(new, lowest)

    def _first_window(self, new: dict[str, float], steps: int, early: float | None) -> tuple[dict[str, float], Verdict]:
        """There is no alarm yet; `best` is the lowest so far, and begins once the window is full."""
        if 10 * (new["steps"] - steps) < self.window:
            new["start"] = new["level"] if early is None or new["rounds"] > 1 else early
        lowest = new["rounds"] == 1 or new["level"] <= new["best"]
        if lowest:
            new["best"] = new["level"]
        if new["steps"] >= self.window:
            new["started"], new["best"] = 1.0, new["level"]
            new["error"] = _AT_FIRST * abs(new["start"])
        return self._verdict(new, lowest)

    def _verdict(self, state: dict[str, float], lowest: bool) -> tuple[dict[str, float], Verdict]:
        if lowest and state["unsaved"] >= self.every:
            return {**state, "unsaved": 0.0}, "best"
        return state, "ok"

    def _smooth(self, state: Mapping[str, float], loss: float, steps: int) -> dict[str, float]:
        """The state with one more round in its means."""
        new = dict(state)
        kept = math.exp(-steps / self.window)
        new["steps"], new["unsaved"] = state["steps"] + steps, state["unsaved"] + steps
        new["rounds"], new["loss"] = state["rounds"] + 1, loss
        loss = _believed(state, loss)
        new["sum"] = kept * state["sum"] + (1 - kept) * loss
        new["weight"] = kept * state["weight"] + (1 - kept)
        new["level"] = new["sum"] / new["weight"]
        if new["started"]:
            new["block_sum"], new["block_steps"] = state["block_sum"] + steps * loss, state["block_steps"] + steps
        return _end_block(new) if 2 * new["block_steps"] >= self.window else new


def _believed(state: Mapping[str, float], loss: float) -> float:
    """What a round with this loss counts as, see `Alarm`."""
    start, level = state["start"], state["level"]
    if not (state["rounds"] or state["started"]):
        return loss
    gained, noise = start - state["best"], _STANDS_OUT * state["error"]
    lowest = min(level, start) - max(abs(start), gained if state["started"] else 0.0, noise)
    loss = max(loss, min(lowest, state["loss"]) if state["rounds"] else lowest)
    room = max(_ODD * gained, noise) if state["started"] else abs(start)
    if not state["rounds"]:  # after an alarm
        return min(loss, start + room)
    return min(loss, max(start + room, level + room, state["loss"]))


def _end_block(new: dict[str, float]) -> dict[str, float]:
    """The state with one more half window, or a round if that is longer, in its noise."""
    mean = new["block_sum"] / new["block_steps"]
    if new["blocks"] >= 2:
        bend = mean - 2 * new["last"] + new["before"]
        kept = math.exp(-1 / _NOISE_BENDS)
        new["noise"] = kept * new["noise"] + (1 - kept) * bend * bend / 6
        new["noise_weight"] = kept * new["noise_weight"] + (1 - kept)
        new["bends"] += 1
    new["last"], new["before"], new["blocks"] = mean, new["last"], new["blocks"] + 1
    new["block_sum"] = new["block_steps"] = 0.0
    return new


def _error(state: Mapping[str, float]) -> float:
    """The standard error of the mean of half a window."""
    error = math.sqrt(state["noise"] / state["noise_weight"]) * (1 + _FEW / state["bends"])
    return max(error, _ROUNDING * abs(state["last"]))


def _gone_back(state: Mapping[str, float]) -> dict[str, float]:
    """The state of a run that was put back to its best: L begins anew, levels and noise stay."""
    return {**state, **_FRESH, "unsaved": 0.0, "alarms": state["alarms"] + 1}


def early_steps(window: int) -> int:
    """How many first steps of a run the start is the mean of, for an alarm with that window."""
    return max(window // 10, 1)


def check_most(rollback: Rollback, state: Mapping[str, float], step: int, checkpoint: str | None = None) -> None:
    """Raise if the alarm with this state, raised at `step`, is one too many; points to the last checkpoint."""
    if state["alarms"] > rollback.most:
        raise RuntimeError(
            f"the run diverged again at step {step}, after {rollback.most} rollbacks, each with {rollback.cut} times "
            "the learning rate: lower rates do not help. Look for bad data, a loss that is not finite, or too little "
            f"precision; or allow more of them: Rollback(most={2 * rollback.most}). {_resume(checkpoint)}"
        )


def _resume(checkpoint: str | None) -> str:
    where = "your last checkpoint, if there is one" if checkpoint is None else f"the last checkpoint, {checkpoint}"
    return f"Resume from {where}"


class Keeper:
    """Keeps the best consensus of a run and puts it back when the run has diverged.

    Args:
        rollback: what to do then.
        alarm: tells when.

    Attributes:
        state: the alarm's; saved with the run, which the snapshot is not.
        kept_at: the step of the snapshot.
    """

    def __init__(self, rollback: Rollback, alarm: Alarm) -> None:
        self.rollback, self._alarm = rollback, alarm
        self.state = alarm.init()
        self.kept_at: int | None = None
        self._shared: Snapshot | None = None
        self._own: list[Tensor] = []

    def watch(
        self, scores: Sequence[float], steps: int, at: int, early: float | None = None, checkpoint: str | None = None
    ) -> Verdict:
        """What to do after a round of `steps` steps that ends at step `at` with these mean losses of the replicas, and
        `early` as the mean of its first ones.

        Raises:
            RuntimeError: if the run has diverged once too often, or before there was anything to go back to.
        """
        self.state, verdict = self._alarm.update(self.state, typical(scores), steps, early)
        if verdict == "alarm":
            check_most(self.rollback, self.state, at, checkpoint)
            if self.kept_at is None:
                raise RuntimeError(
                    f"the loss is {scores} at step {at}, before the first full round since the start or the resume: "
                    "there is nothing to go back to; begin with a lower learning rate, or look for bad data. "
                    f"{_resume(checkpoint)}"
                )
        return verdict

    @torch.no_grad()
    def keep(self, shared: Sequence[Tensor], own: Sequence[Tensor], replicas: Replicas, at: int) -> None:
        """Take a snapshot: of `shared`, which are equal on all replicas, a share; of `own` all. Waits for the device.

        Nothing is kept of weights that are not finite.
        """
        if not replicas.all_true(bool(finite(shared, torch.device("cpu")))):
            return
        self._shared = Snapshot(replicas) if self._shared is None else self._shared
        self._shared.save(shared)
        self._own = [t.detach().clone() for t in own]
        self.kept_at = at

    def fits(self, shared: Sequence[Tensor], own: Sequence[Tensor]) -> bool:
        """Whether there is a snapshot of these tensors."""
        return self._shared is not None and self._shared.fits(shared) and len(own) == len(self._own)

    @torch.no_grad()
    def put_back(self, shared: Sequence[Tensor], own: Sequence[Tensor]) -> None:
        """Put the snapshot back, in place. Collective."""
        assert self._shared is not None
        self._shared.restore(shared)
        for tensor, value in zip(own, self._own, strict=True):
            tensor.copy_(value)
