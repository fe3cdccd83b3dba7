"""Rollback within an ensemble: which tensors are kept, and what is said when they are put back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hdet.rollback.rollback import Keeper, Rollback, Verdict
from hdet.rounds import Rounds
from hdet.tensors import Tensors


class Recovery:
    """Watches the rounds of an ensemble and puts its best consensus back. Does nothing without a `rollback`.

    Args:
        rollback: when, and what then.
        tensors: what is kept and put back.
        rounds: where the run is.

    Attributes:
        early: how many first steps of a run its start is the mean of; 0 without a rollback.
    """

    def __init__(self, rollback: Rollback | None, tensors: Tensors, rounds: Rounds) -> None:
        self._keeper = None if rollback is None else Keeper(rollback)
        self.early = 0 if rollback is None else rollback.alarm.early
        self._tensors, self._rounds = tensors, rounds

    @property
    def active(self) -> bool:
        """Whether there is a rollback."""
        return self._keeper is not None

    @property
    def cut(self) -> float:
        """What the learning rates are multiplied by when it goes back."""
        return 1.0 if self._keeper is None else self._keeper.rollback.cut

    def watch(self, losses: Sequence[float], early: float | None, checkpoint: str | None) -> Verdict:
        """What to do after a round with these mean losses of the replicas that count, none if nobody was judged, and
        `early` as the mean of its first ones.

        Raises:
            RuntimeError: if the run has diverged once too often, or before there was anything to go back to.
        """
        at = self._rounds.at
        if self._keeper is None or not losses or not at.step_in_round:
            return "ok"
        return self._keeper.watch(losses, at.step_in_round, at.step, early, checkpoint)

    def keep(self) -> None:
        """Take a snapshot."""
        if self._keeper is not None:
            self._keeper.keep(*self._tensors.kept(), self._rounds.replicas, self._rounds.at.step)

    def keep_if_none(self) -> None:
        """Take one if the last does not fit: a run that was resumed, or that trains other layers now."""
        if self._keeper is not None and not self._keeper.fits(*self._tensors.kept()):
            self.keep()

    def put_back(self, losses: Sequence[float]) -> str:
        """Put the snapshot back; what happened, in words. Collective."""
        assert self._keeper is not None
        self._keeper.put_back(*self._tensors.kept())
        self._rounds.at.equal = True
        seen = [loss for loss in losses if math.isfinite(loss)] or losses
        return (
            f"rolled back at step {self._rounds.at.step} to the weights of step {self._keeper.kept_at}: the loss was "
            f"{sum(seen) / len(seen):.4g}; learning rates x{self.cut:g}"
        )

    def state_dict(self) -> dict[str, float] | None:
        """The alarm's state; the snapshot is not saved. None without a rollback."""
        return None if self._keeper is None else dict(self._keeper.state)

    def load_state_dict(self, state: Mapping[str, float] | None) -> None:
        """Go on from `state_dict()`, if there was one."""
        if self._keeper is not None and state is not None:
            self._keeper.state = dict(state)
