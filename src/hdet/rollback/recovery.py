"""Rollback within an ensemble: which tensors are kept, and what is said when they are put back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hdet.board import who
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

    def watch(self, losses: Sequence[float], early: float | None, checkpoint: str | None, lost: str = "") -> Verdict:
        """What to do after a round with these mean losses of the replicas that count, none if nobody was judged, and
        `early` as the mean of its first ones; `lost` says why no replica counts, if none does.

        Raises:
            RuntimeError: if the run has diverged once too often, or before there was anything to go back to.
        """
        at = self._rounds.at
        if self._keeper is None or not losses or not at.step_in_round:
            return "ok"
        if lost and self._keeper.kept_at is None:
            where = (
                "your last checkpoint, if there is one" if checkpoint is None else f"the last checkpoint, {checkpoint}"
            )
            raise RuntimeError(
                f"{lost} at step {at.step}, before the first full round since the start or the resume: there is "
                "nothing to go back to; begin with a lower learning rate, or look for bad data. Resume from " + where
            )
        return self._keeper.watch(losses, at.step_in_round, at.step, early, checkpoint)

    def keep(self) -> None:
        """Take a snapshot."""
        if self._keeper is not None:
            self._keeper.keep(*self._tensors.kept(), self._rounds.replicas, self._rounds.at.step)

    def keep_if_none(self) -> None:
        """Take one if the last does not fit: a run that was resumed, or that trains other layers now."""
        if self._keeper is not None and not self._keeper.fits(*self._tensors.kept()):
            self.keep()

    def put_back(self, why: str) -> str:
        """Put the snapshot back; what happened and why, in words. Collective."""
        assert self._keeper is not None
        self._keeper.put_back(*self._tensors.kept())
        self._rounds.at.equal = True
        return (
            f"rolled back at step {self._rounds.at.step} to the weights of step {self._keeper.kept_at}: {why}; "
            f"learning rates x{self.cut:g}"
        )

    def state_dict(self) -> dict[str, float] | None:
        """The alarm's state; the snapshot is not saved. None without a rollback."""
        return None if self._keeper is None else dict(self._keeper.state)

    def load_state_dict(self, state: Mapping[str, float] | None) -> None:
        """Go on from `state_dict()`, if there was one."""
        if self._keeper is not None and state is not None:
            self._keeper.state = {**self._keeper.rollback.alarm.init(), **state}  # older states lack some


def in_words(losses: Sequence[float]) -> str:
    """What the losses of the replicas were: their mean, or those that are not finite.

    >>> in_words([1.0, math.inf]), in_words([math.nan, math.nan]), in_words([1.0, 2.0])
    ('the loss was inf on replica 1', 'the loss was nan', 'the loss was 1.5')
    """
    odd: dict[str, list[int]] = {}
    for replica, loss in enumerate(losses):
        if not math.isfinite(loss):
            odd.setdefault(str(loss), []).append(replica)
    if not odd:
        return f"the loss was {sum(losses) / len(losses):.4g}"
    everywhere = len(odd) == 1 and len(next(iter(odd.values()))) == len(losses)
    return "the loss was " + ", ".join(f"{loss}{'' if everywhere else f' on {who(r)}'}" for loss, r in odd.items())
