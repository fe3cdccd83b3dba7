"""How one replica is: its guards, what it tells the others, and when there is nothing left to go on with."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from hdet.board import counted
from hdet.guard.gradients import GradientGuard, finite
from hdet.guard.quarantine import Census, Statistics, condition
from hdet.judge import Judged
from hdet.rounds import Rounds
from hdet.settings import Settings
from hdet.tensors import Tensors

_MOST_HOPELESS = 3


class Health:
    """Keeps what is not finite from spreading, where the ensemble is guarded, and gives up where nothing else is left.

    Args:
        settings: of the ensemble.
        tensors: what is looked at.
        rounds: where the run is.

    Attributes:
        gradients: the gradient guard; watches nothing if the ensemble is not guarded.
        last_checkpoint: where the run can be resumed from, for errors that end it.
    """

    def __init__(self, settings: Settings, tensors: Tensors, rounds: Rounds) -> None:
        self.guarded = settings.guarded
        self.gradients = GradientGuard(settings.optimizers if self.guarded else ())
        self.last_checkpoint: str | None = None
        self._recovers = settings.rollback is not None
        self._tensors, self._rounds = tensors, rounds
        self._statistics = Statistics()
        self._hopeless = 0  # rounds in a row without anything finite
        self.begin_round()

    def begin_round(self) -> None:
        """Remember the statistics that a round begins with."""
        if self.guarded:
            self._statistics.keep(self._tensors.statistics())

    def mend(self) -> None:
        """Put them back if they are not finite any more."""
        if self.guarded:
            self._statistics.mend(self._tensors.statistics())

    def condition(self, device: torch.device, *, full: bool, joining: bool, ended: bool) -> Tensor:
        """What the others are told at the end of a round; see `quarantine.condition`."""
        weights = self._tensors.weights() if self.guarded else []
        state = self._tensors.state() if self.guarded or joining else []
        step = self._rounds.at.step
        return condition(weights, state, self.gradients.skipped, device, ended=ended, step=step, full=full)

    def look_back(self, judged: Judged, census: Census) -> None:
        """After the averaging: raise if the round has left nothing to go on with."""
        stuck = census.stuck(self._rounds.at.step_in_round)
        if stuck:
            self._despair(stuck)
        elif not judged.given or any(map(math.isfinite, judged.scores)):
            self._hopeless = 0
        elif not self._recovers:
            self._despair(f"the loss of every replica is {judged.scores[0]}", self._tensors.weights())

    def tell_skipped(self) -> tuple[str, ...]:
        """The events of a round in which all replicas did the same; a warning too, as there may be no record of it."""
        if not self.guarded or not bool(self.gradients.skipped):
            return ()
        skipped, steps = int(self.gradients.skipped), self._rounds.at.step_in_round
        said = f"guard: skipped {skipped} of {counted(steps, 'step')}, as the gradient was not finite"
        warnings.warn(said, stacklevel=4)
        if skipped < steps:
            self._hopeless = 0
        else:
            self._despair("no gradient is finite any more")
        return (said,)

    def diverged(self, what: str) -> RuntimeError:
        """The error that ends the run."""
        place = (
            f" from {self.last_checkpoint}" if self.last_checkpoint else ", from your last checkpoint if there is one"
        )
        return RuntimeError(
            f"the run has diverged: {what} at step {self._rounds.at.step}. Begin again with a lower learning rate"
            f"{place}, or let it recover by itself: rollback=hdet.Rollback(); hdet.find_lr finds a rate beforehand"
        )

    def _despair(self, what: str, weights: Sequence[Tensor] = ()) -> None:
        """Nothing finite was seen in this round: raise if the weights are not finite either, or at the third time."""
        self._hopeless += 1
        if self._hopeless >= _MOST_HOPELESS or not bool(finite(weights, torch.device("cpu"))):
            raise self.diverged(what)
