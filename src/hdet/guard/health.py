"""How one replica is: its guards, what it tells the others, and when there is nothing left to go on with."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from hdet.board import counted, who
from hdet.guard.gradients import GradientGuard, finite, looked_at
from hdet.guard.quarantine import NOT_SPOILED, Census, Moment, Spoiled, Statistics, condition
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
        self._statistics, self._followers = Statistics(mends=self.guarded), Statistics(mends=False)
        self._mended, self._since = NOT_SPOILED, ""
        self._hopeless = 0  # rounds in a row without anything finite
        self.begin_round()

    def begin_round(self, first: bool = False) -> None:
        """Remember the statistics that a round begins with; before the `first` step a forward pass may be behind.

        Without the guard it is enough to know which were finite once.
        """
        self._mended, self._since = NOT_SPOILED, "at the start of the round"
        moment: Moment = "late" if first else "round"
        if self._watches and (self.guarded or first or not self._statistics.kept):
            self._statistics.keep(self._watched(), moment)
        if self.guarded:
            self._followers.keep(self._tensors.followers(), moment)

    def note_load(self) -> None:
        """Weights or the state of a run were loaded: with the guard, what is spoiled from now on goes back to these."""
        if not self.guarded:
            return
        self._mended = NOT_SPOILED
        if self._rounds.at.step_in_round:
            self._since = "when the state was loaded"
        self._statistics.keep(self._watched(), "loaded")
        self._followers.keep(self._tensors.followers(), "loaded")

    def mend(self) -> None:
        """Put them back if they are not finite any more."""
        if self.guarded:
            found = self._statistics.mend(self._tensors.statistics())
            self._mended = found if found.several else self._mended

    def condition(self, device: torch.device, *, full: bool, joining: bool, ended: bool) -> Tensor:
        """What the others are told at the end of a round; see `quarantine.condition`."""
        state = self._tensors.state() if self.guarded or joining else []
        looked_at = [*self._looked_at(), *state]
        spoiled = torch.tensor(self._mended) if self.guarded else self._statistics.spoiled(self._watched())
        step, skipped = self._rounds.at.step, self.gradients.skipped
        return condition(looked_at, state, spoiled, skipped, device, ended=ended, step=step, full=full)

    def tell_spoiled(self, census: Census, went_back: bool) -> tuple[str, ...]:
        """The events of a round in which a replica's statistics were spoiled; a warning too where they are averaged.

        Args:
            census: how the replicas are.
            went_back: the run has gone back to its best consensus, statistics included.
        """
        if not census.spoiled or went_back:
            return ()
        where = "all replicas" if len(census.spoiled) == len(census.skipped) else who(tuple(census.spoiled))
        text = self._spoiled(next(iter(census.spoiled.values())), f" on {where}")
        if not self.guarded:
            self._statistics.forget()
            shared = self._rounds.diverges and len(census.spoiled) < len(census.skipped)
            text += " and is averaged into all replicas" if shared else ""
            text += ". Training goes on, but evaluation may not work: look for bad data; guard=True keeps that out"
            warnings.warn(text, stacklevel=6)
        return (text,)

    def lost(self, census: Census) -> str:
        """What is not finite where no replica counts."""
        weights, state = self._looked_at(), self._tensors.state()
        named = looked_at([*weights, *state])
        known = census.same_state and not self._rounds.replicas.sharded
        names = {r: self._tensors.name(named[n]) if known and n >= 0 else "" for r, n in census.odd.items()}
        first, *_ = names
        if len(set(names.values())) > 1:
            return "no replica is finite: " + ", ".join(f"{name} of replica {r} is not" for r, name in names.items())
        kept = {id(t) for t in weights}
        of_state = known and id(named[census.odd[first]]) not in kept
        if of_state:
            return (
                f"no replica's optimizer state is finite ({names[first]}; if a gradient was too large for it, clip "
                "gradients)"
            )
        return "no replica's weights are finite" + (f" ({names[first]})" if names[first] else "")

    @property
    def _watches(self) -> bool:
        """Whether statistics are looked at: where replicas meet, and with the guard in plain training too."""
        return self.guarded or self._recovers or self._rounds.diverges

    def _watched(self) -> list[Tensor]:
        """What can be spoiled silently; with the guard followers are looked at with the weights."""
        return self._tensors.statistics() if self.guarded else [*self._tensors.statistics(), *self._tensors.followers()]

    def _looked_at(self) -> list[Tensor]:
        """What a replica that counts has finite, beside its optimizer state."""
        if not self.guarded:
            return []
        return [*self._tensors.learned(), *self._followers.were_finite(self._tensors.followers())]

    def _spoiled(self, found: Spoiled, where: str = "") -> str:
        """What was spoiled, and with the guard put back."""
        number, several, left = found
        named = looked_at(self._watched())
        known = not self._rounds.replicas.sharded and 0 <= number < len(named)
        name = self._tensors.name(named[number]) if known else "a buffer"
        more = f" (and {several - 1} more)" if several > 1 else ""
        text = f"{name}{more} was not finite{where} at step {self._rounds.at.step}"
        if not self.guarded:
            return text
        if not left:
            return f"guard: {text} and was put back to its value {self._since}"
        none = "no finite value to go back to, as that was loaded: evaluation may not work"
        if left == several:
            return f"guard: {text} and has {none}"
        return f"guard: {text} and was put back to its value {self._since}, except for {left} with {none}"

    def look_back(self, judged: Judged, census: Census) -> None:
        """After the averaging: raise if the round has left nothing to go on with."""
        stuck = census.stuck(self._rounds.at.step_in_round)
        if stuck:
            self._despair(stuck)
        elif not judged.given or any(map(math.isfinite, judged.scores)):
            self._hopeless = 0
        elif not self._recovers:
            losses = ", ".join(dict.fromkeys(map(str, judged.scores)))
            self._despair(f"the loss of every replica is {losses}", self._tensors.learned())

    def tell_skipped(self) -> tuple[str, ...]:
        """The events of a round in which all replicas did the same; a warning too, as there may be no record of it."""
        told = (self._spoiled(self._mended),) if self._mended.several else ()
        for said in told:
            warnings.warn(said, stacklevel=4)
        if not self.guarded or not bool(self.gradients.skipped):
            return told
        skipped, steps = int(self.gradients.skipped), self._rounds.at.step_in_round
        said = f"guard: skipped {skipped} of {counted(steps, 'step')}, as the gradient was not finite"
        warnings.warn(said, stacklevel=4)
        if skipped < steps:
            self._hopeless = 0
        else:
            self._despair("no gradient is finite any more")
        return (*told, said)

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
