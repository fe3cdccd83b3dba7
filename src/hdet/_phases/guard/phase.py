"""The guard: leaves out or restores what is not finite at the end of a round, or ends the run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hdet._phases.guard.census import (
    NOT_SPOILED,
    Census,
    Moment,
    Spoiled,
    Statistics,
    condition,
    restore_state,
    take_census,
)
from hdet._phases.guard.gradients import GradientGuard
from hdet._phases.phase import Phase, Round
from hdet._probe.score import Loss
from hdet._replicas.store import counted, who
from hdet._run.run import Data, Run
from hdet._tensors.finite import finite, looked_at
from hdet._user_warning import warn

_MOST_HOPELESS = 3


class Guard(Phase):
    """With `guard`, leaves out steps and replicas that are not finite, and gives up if nothing finite is left.

    Without `guard`, reports statistics that are not finite and ends a run in which nothing is finite with an error.
    """

    name = "guard"

    def __init__(self, run: Run) -> None:
        given = run.settings.safety
        self._run, self._tensors = run, run.tensors
        self._guarded, self._recovers = given.guard, given.rollback is not None
        self._gradients = GradientGuard(run.settings.optimizers if given.guard else ())
        self._statistics, self._followers = Statistics(mends=given.guard), Statistics(mends=False)
        self._mended, self._since = NOT_SPOILED, ""
        self._hopeless = 0  # rounds in a row without anything finite
        self._census = Census(())
        self._keep("round")

    # While a round is trained

    def step(self, loss: Loss | None) -> None:
        self._gradients.count()

    def ends_round(self) -> bool:
        """End the round at once if one sick replica keeps all from training."""
        if not self._guarded or self._run.settings.local or self._run.data is not Data.EVEN:
            return False
        return self._gradients.stuck

    def dealt(self, first: bool) -> None:
        self._keep("late" if first else "round")  # a forward pass may precede the first step

    def resumed(self) -> None:
        self.weights_loaded()

    def weights_loaded(self) -> None:
        if self._guarded:
            self._mended = NOT_SPOILED
            if self._run.at.step_in_round:
                self._since = "when the state was loaded"
            self._statistics.keep(self._watched(), "loaded")
            self._followers.keep(self._tensors.followers(), "loaded")

    # When it ends

    def prepare(self, rnd: Round) -> None:
        """Restore statistics that are no longer finite."""
        if self._guarded:
            found = self._statistics.mend(self._tensors.statistics())
            self._mended = found if found.several else self._mended

    def tell(self, rnd: Round) -> None:
        state = self._tensors.state() if self._guarded or self._run.data is not Data.EVEN else []
        spoiled = torch.tensor(self._mended) if self._guarded else self._statistics.spoiled(self._watched())
        skipped = self._gradients.skipped
        rnd.tell(self.name, condition([*self._looked_at(), *state], state, spoiled, skipped, rnd.device))

    def hear(self, rnd: Round) -> None:
        census = take_census(rnd.heard(self.name), rnd.ended, rnd.scores, rnd.given and self._guarded)
        self._census = census
        rnd.healthy, rnd.sick = census.healthy, census.sick
        rnd.scores = census.shown(rnd.scores)
        rnd.probe = None if rnd.probe is None else census.shown(rnd.probe)
        rnd.lost = self.what_is_lost(census) if census.lost else ""
        rnd.losses = census.losses(rnd.scores, rnd.given, self._guarded)

    def after(self, rnd: Round) -> None:
        if not rnd.compares:
            rnd.events += self._alone(rnd)
            return
        census = self._census
        if not census.all_well:
            own = not self._run.settings.averaging.state
            restore_state(census, self._tensors.state(), self._run.replicas, own)
        self._look_back(rnd, census)
        rnd.events += [*self._tell_spoiled(rnd, census), *census.events(rnd.step)]

    def undone(self, rnd: Round) -> None:
        rnd.events += self._census.events(rnd.step)

    def ended(self, rnd: Round) -> None:
        self._gradients.reset()

    def release(self) -> None:
        self._gradients.close()

    # What is looked at

    def _keep(self, moment: Moment) -> None:
        """Remember the statistics at a round's start; without the guard, only which of them were ever finite."""
        self._mended, self._since = NOT_SPOILED, "at the start of the round"
        watches = self._guarded or self._recovers or self._run.rounds.diverges
        if watches and (self._guarded or moment == "late" or not self._statistics.kept):
            self._statistics.keep(self._watched(), moment)
        if self._guarded:
            self._followers.keep(self._tensors.followers(), moment)

    def _watched(self) -> list[Tensor]:
        """Tensors that can be spoiled silently; with the guard, followers are checked with the weights instead."""
        followers = [] if self._guarded else self._tensors.followers()
        return [*self._tensors.statistics(), *followers]

    def _looked_at(self) -> list[Tensor]:
        """The tensors that must be finite for a replica to count, besides its optimizer state."""
        if not self._guarded:
            return []
        return [*self._tensors.learned(), *self._followers.were_finite(self._tensors.followers())]

    # What is told

    def what_is_lost(self, census: Census) -> str:
        """What is not finite if no replica counts."""
        weights, state = self._looked_at(), self._tensors.state()
        named = looked_at([*weights, *state])
        known = census.same_state and not self._run.replicas.sharded
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

    def _tell_spoiled(self, rnd: Round, census: Census) -> list[str]:
        """The event of a round that spoiled statistics; also warns if they are averaged."""
        if not census.spoiled:
            return []
        where = "all replicas" if len(census.spoiled) == rnd.replicas else who(tuple(census.spoiled))
        text = self._spoiled(next(iter(census.spoiled.values())), rnd.step, f" on {where}")
        if not self._guarded:
            self._statistics.forget()
            shared = self._run.rounds.diverges and len(census.spoiled) < rnd.replicas
            text += " and is averaged into all replicas" if shared else ""
            text += ". Training goes on, but evaluation may not work: look for bad data; "
            text += "safety=hdet.Safety(guard=True) keeps that out"
            warn(text)
        return [text]

    def _spoiled(self, found: Spoiled, step: int, where: str = "") -> str:
        """The statistics that were spoiled and, with the guard, restored."""
        number, several, left = found
        named = looked_at(self._watched())
        known = not self._run.replicas.sharded and 0 <= number < len(named)
        name = self._tensors.name(named[number]) if known else "a buffer"
        more = f" (and {several - 1} more)" if several > 1 else ""
        text = f"{name}{more} was not finite{where} at step {step}"
        if not self._guarded:
            return text
        if not left:
            return f"guard: {text} and was put back to its value {self._since}"
        none = "no finite value to go back to, as that was loaded: evaluation may not work"
        if left == several:
            return f"guard: {text} and has {none}"
        return f"guard: {text} and was put back to its value {self._since}, except for {left} with {none}"

    def _alone(self, rnd: Round) -> list[str]:
        """The events of a round without fan-out; also warns, because there may be no record of it."""
        told = [self._spoiled(self._mended, rnd.step)] if self._mended.several else []
        skipped = int(self._gradients.skipped) if self._guarded else 0
        if skipped:
            steps = counted(rnd.steps, "step")
            told.append(f"guard: skipped {skipped} of {steps}, as the gradient was not finite")
        for text in told:
            warn(text)
        if skipped and skipped < rnd.steps:
            self._hopeless = 0
        elif skipped:
            self._despair("no gradient is finite any more")
        return told

    # When nothing is left

    def _look_back(self, rnd: Round, census: Census) -> None:
        """After the averaging: raise if the round left nothing to continue with."""
        stuck = census.stuck(rnd.steps)
        if stuck:
            self._despair(stuck)
        elif not rnd.given or any(map(math.isfinite, rnd.scores)):
            self._hopeless = 0
        elif not self._recovers:
            losses = ", ".join(dict.fromkeys(map(str, rnd.scores)))
            self._despair(f"the loss of every replica is {losses}", self._tensors.learned())

    def _despair(self, what: str, weights: Sequence[Tensor] = ()) -> None:
        """This round had nothing finite: raise if the weights are not finite either, or the third time in a row."""
        self._hopeless += 1
        if self._hopeless >= _MOST_HOPELESS or not bool(finite(weights, torch.device("cpu"))):
            raise self._run.diverged(what)
