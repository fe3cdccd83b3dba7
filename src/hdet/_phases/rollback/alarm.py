"""Detects divergence (`Alarm`) and returns to the best weights (`Keeper`), which `snapshot.py` stores.

The alarm is pure, as controllers are: it runs in float64 on the host with the same losses on every replica, so every
replica reaches the same verdict without communication.
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

# Gains and losses of fewer standard errors count as noise. With 6 of them, noise that lasts for several rounds (a
# correlation of 1/2 between rounds of 100 steps) raised false alarms in 2-4 % of runs; with 8 in none of 300.
_STANDS_OUT = 8.0
_AT_FIRST = 1 / 32  # of the start, until the noise is known: 8 of them are a quarter
_LEAST_BENDS = 4  # second differences, of six half windows in a row, needed to estimate the noise
_FEW = 8.0  # bends may be small by chance: multiply the noise by (1 + 8 / bends)
_NOISE_BENDS = 30  # bends that the noise is averaged over
_ODD = 1 / 4  # of the gain: with the full gain, two odd rounds within four raised alarms, with this none
_ROUNDING = 1e-6  # least noise, relative to the loss: single precision

_FRESH = dict.fromkeys(
    ("steps", "rounds", "loss", "sum", "weight", "level", "block_sum", "block_steps", "blocks", "last", "before"), 0.0
)
_KEPT = dict.fromkeys(("noise", "noise_weight", "bends", "started", "start", "best", "error", "unsaved", "alarms"), 0.0)


@dataclass(frozen=True)
class Alarm:
    """Detects that a run has lost more than half of what it had gained, or that its loss is not finite.

    The mean training loss of each round enters an exponential mean L over `window` steps, in which a round of T steps
    has the weight of T steps. From `window` steps on::

        start = L over the first tenth of a window     best = the lowest L     e = the noise in L
        alarm:   start - best > 8 e   and   L - best > max((start - best) / 2, 8 e)

    L is taken from two rounds in a row, the higher one for `best` and the lower one for the alarm, so one odd round
    causes neither. Nor does it stay in L: if a round exceeds the start, or L if that is higher, by more than a quarter
    of the gain and by more than 8 e, it is clipped there, unless the round before was as bad. (In the first window
    rounds are clipped to twice the start.) A round that is lower than any before by more than the start or the gain is
    clipped likewise, unless the round before was as low. A loss that is not finite raises the alarm at once. After an
    alarm L starts over, and for `window` steps only a loss that is not finite raises another; start and best stay.

    The start is the mean of the first steps, ten with the default window, and so about the loss of an untrained model.
    A full window would be too many: a run whose rate is too high often learns and is lost again within two or three
    windows, and would seem to have gained nothing. One step would be too few: one bad batch would set the level. A
    start that is too high only delays the alarm. `best` starts at the end of the first window.

    The noise e is that of means over half a window (or a round, if longer); second differences separate it from a
    steady rise or fall. It leaves out the first window, is known six half windows later, and is assumed to be 1/32 of
    `start` until then. It is not updated while L stands out from the best, so that divergence does not count as noise.

    A run whose gain does not exceed the noise has nothing to lose: there is no alarm while its loss is finite. So the
    alarm misses a run that climbs to a finite height from its first step.

    Args:
        window: number of steps to average over. Too few raise false alarms, more so with small batches.
        every: minimum number of steps between two verdicts "best", each of which triggers a snapshot.
    """

    window: int = 100
    every: int = 100

    def __post_init__(self) -> None:
        check_count("window", self.window)
        check_count("every", self.every)

    @property
    def early(self) -> int:
        """The number of first steps that `start` is the mean of."""
        return early_steps(self.window)

    def init(self) -> dict[str, float]:
        """The state before the first round: plain floats, saved as they are."""
        return {**_FRESH, **_KEPT, "unsaved": float(self.every)}

    def update(
        self, state: Mapping[str, float], loss: float, steps: int, early: float | None = None
    ) -> tuple[dict[str, float], Verdict]:
        """The state after a round of `steps` steps with this mean loss, and the verdict. Does not change `state`.

        Args:
            state: the state after the last round.
            loss: mean loss of the round.
            steps: steps of the round.
            early: mean loss of its first `self.early` steps: the start, if it is the first round. Without it the start
                is the mean of the whole first round.

        Returns:
            "best": the lowest L so far, at least `every` steps after the previous best: take a snapshot. The first
            round is always one, so that a rollback is possible from the second round on.
            "alarm": roll back. The returned state is that of a run after the rollback.
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
        """The state in the first window: no alarm; `best` is the lowest L so far, from the end of the window on."""
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
        """Add a round to the means."""
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
    """The loss, clipped as `Alarm` describes."""
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
    """Add half a window, or a round if that is longer, to the noise."""
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
    """The state after a rollback: L starts over, levels and noise stay."""
    return {**state, **_FRESH, "unsaved": 0.0, "alarms": state["alarms"] + 1}


def early_steps(window: int) -> int:
    """The number of first steps that the start is the mean of, for an alarm with that window."""
    return max(window // 10, 1)


def check_most(rollback: Rollback, state: Mapping[str, float], step: int, checkpoint: str | None = None) -> None:
    """Raise if this alarm, at `step`, is one too many; the error points to the last checkpoint."""
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
        rollback: the options.
        alarm: detects divergence.

    Attributes:
        state: the alarm's state; saved with the run, unlike the snapshot.
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
        """The verdict after a round of `steps` steps that ends at step `at` with these mean losses of the replicas;
        `early` is the mean of its first steps.

        Raises:
            RuntimeError: if the run has diverged once too often, or before the first snapshot.
        """
        self.state, verdict = self._alarm.update(self.state, typical(scores), steps, early)
        if verdict == "alarm":
            check_most(self.rollback, self.state, at, checkpoint)
            if self.kept_at is None:
                raise RuntimeError(
                    f"the loss is {scores} at step {at}, before the first full round since the start or the resume: "
                    "there is nothing to go back to; start with a lower learning rate, or look for bad data. "
                    f"{_resume(checkpoint)}"
                )
        return verdict

    @torch.no_grad()
    def keep(self, shared: Sequence[Tensor], own: Sequence[Tensor], replicas: Replicas, at: int) -> None:
        """Take a snapshot: a share of `shared`, which is equal on all replicas, and all of `own`. Blocks on the device.

        Weights that are not finite are not kept.
        """
        if not replicas.all_true(bool(finite(shared, torch.device("cpu")))):
            return
        self._shared = Snapshot(replicas) if self._shared is None else self._shared
        self._shared.save(shared)
        self._own = [t.detach().clone() for t in own]
        self.kept_at = at

    def fits(self, shared: Sequence[Tensor], own: Sequence[Tensor]) -> bool:
        """Whether the snapshot is of these tensors."""
        return self._shared is not None and self._shared.fits(shared) and len(own) == len(self._own)

    @torch.no_grad()
    def put_back(self, shared: Sequence[Tensor], own: Sequence[Tensor]) -> None:
        """Restore the snapshot in place. Collective."""
        assert self._shared is not None
        self._shared.restore(shared)
        for tensor, value in zip(own, self._own, strict=True):
            tensor.copy_(value)
