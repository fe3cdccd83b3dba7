"""Rollback: returns a diverged run to its best consensus, with lower learning rates."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hdet._options.safety import Rollback
from hdet._phases.phase import Phase, Round, State
from hdet._phases.rollback.alarm import Alarm, Keeper
from hdet._replicas.store import who
from hdet._run.run import Run


class GoBack(Phase):
    """Watches the losses, keeps the best consensus and restores it. Does nothing unless `rollback` was given."""

    name = "rollback"

    def __init__(self, run: Run) -> None:
        self._run = run
        rollback, self._keeper = run.settings.safety.rollback, None
        if isinstance(rollback, Rollback):
            self._keeper = Keeper(rollback, Alarm(rollback.window, rollback.every))
        self._is_best = False

    def begin(self) -> None:
        """Take a snapshot if the last one does not fit, as after a resume or if other layers are trained now."""
        at = self._run.at
        begins = at.step > 0 and not at.step_in_round
        if begins and self._keeper is not None and not self._keeper.fits(*self._run.tensors.kept()):
            self._keep()

    def decide(self, rnd: Round) -> None:
        self._is_best = False
        if self._keeper is None or not rnd.losses or not rnd.steps:
            return
        checkpoint = self._run.last_checkpoint
        if rnd.lost and self._keeper.kept_at is None:
            where = (
                "your last checkpoint, if there is one" if checkpoint is None else f"the last checkpoint, {checkpoint}"
            )
            raise RuntimeError(
                f"{rnd.lost} at step {rnd.step}, before the first full round since the start or the resume: there is "
                "nothing to go back to; start with a lower learning rate, or look for bad data. Resume from " + where
            )
        verdict = self._keeper.watch(rnd.losses, rnd.steps, rnd.step, rnd.early, checkpoint)
        self._is_best = verdict == "best"
        if verdict == "alarm":
            rnd.alarm = rnd.lost or in_words(rnd.all_scores)
            rnd.cut = self._keeper.rollback.cut

    def after(self, rnd: Round) -> None:
        if self._is_best:
            self._keep()

    def undone(self, rnd: Round) -> None:
        assert self._keeper is not None
        self._keeper.put_back(*self._run.tensors.kept())
        self._run.made_equal()
        rnd.events.append(
            f"rolled back at step {rnd.step} to the weights of step {self._keeper.kept_at}: {rnd.alarm}; "
            f"learning rates x{rnd.cut:g}"
        )

    def state_dict(self) -> State:
        """The alarm's state; the snapshot is not saved."""
        return {} if self._keeper is None else {"alarm": dict(self._keeper.state)}

    def load_state_dict(self, state: State, own: State) -> None:
        if self._keeper is not None and state:
            self._keeper.state = dict(state["alarm"])

    def _keep(self) -> None:
        assert self._keeper is not None
        self._keeper.keep(*self._run.tensors.kept(), self._run.replicas, self._run.at.step)


def in_words(losses: Sequence[float]) -> str:
    """The replicas' losses in words: their mean, or those that are not finite.

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
