"""The state that all phases of an ensemble share: settings, position, tensors and values."""

from __future__ import annotations

import time
from enum import Enum, auto

from hdet._explore.values import Values
from hdet._find_lr.found_rate import FoundRate
from hdet._replicas import Replicas
from hdet._replicas.agreement import settle
from hdet._replicas.fingerprint import Claims
from hdet._run.rounds import Position, Rounds
from hdet._run.settings import Settings
from hdet._tensors.tensors import Tensors
from hdet._tensors.warm_init import take_noise
from hdet.controllers.steering import Steering


class Data(Enum):
    """Whether this replica has data."""

    EVEN = auto()
    """As many as all others."""
    UNEVEN = auto()
    """Within `join()`: some replicas may have fewer."""
    ENDED = auto()
    """Within `join()`: no more."""


class Run:
    """One run of one ensemble, seen from one replica.

    Args:
        settings: the ensemble's arguments, checked.

    Attributes:
        at: the run's position.
        data: whether this replica has data.
        found: the result of a search before the first step.
        clock: start of this round, by `time.perf_counter()`.
        last_checkpoint: the checkpoint that a fatal error suggests resuming from.
        resumed: whether the run was resumed from a saved state.
    """

    def __init__(self, settings: Settings) -> None:
        given = self.settings = settings
        explorable, averaging = given.hyperparameters, given.averaging
        self.tensors = Tensors(
            given.optimizers, given.model, averaging.followers, explorable, given.local, not averaging.state
        )
        names = [h.name for h in explorable]
        self.steering = Steering(given.controller, names, given.observe_only, given.safety.limits)
        self.rounds = Rounds(
            explorable, given.interval, given.total_steps, given.seed, given.replicas,
            design=given.design, until=given.plan.until, local=given.local,
        )  # fmt: skip
        self.rounds.start_from(0)
        self.at: Position = self.rounds.at
        self.values = Values(given.optimizers, explorable)
        self.note_data(Data.EVEN)
        self.found: FoundRate | None = None
        self.start_clock()
        self.last_checkpoint: str | None = None
        self.resumed = False
        self._agreed = self.replicas.ranks.size > 1

    @property
    def replicas(self) -> Replicas:
        """Who the replicas are."""
        return self.rounds.replicas

    @property
    def scales(self) -> dict[str, float]:
        """The factor on each hyperparameter's schedule, by name: center = base * scale."""
        scales = self.steering.scales
        return dict.fromkeys(scales, 1.0) if self.at.closed else scales

    def write_values(self) -> None:
        """Write the values that this replica trains with from the next step on."""
        self.values.set(self.scales, self.rounds.multipliers)

    def start_clock(self) -> None:
        """Note that a round begins now."""
        self.clock = time.perf_counter()

    def note_data(self, data: Data) -> None:
        """Note whether this replica has data."""
        self.data: Data = data

    def note_resume(self) -> None:
        """Note that the run was resumed from a saved state, unless that was saved before the first step."""
        self.resumed = self.at.step > 0

    # Whether the replicas hold the same

    @property
    def equal(self) -> bool:
        """Whether the replicas are known to hold the same weights."""
        return not self.rounds.diverges or (self.at.equal and not self.values.fan_out.steps)

    def made_equal(self) -> None:
        """Note that the replicas now hold the same weights: they were averaged or rolled back together."""
        self.at.equal = True

    @property
    def mid_round(self) -> bool:
        """Whether a round is under way and the replicas hold different weights."""
        at = self.at
        begun = (at.step_in_round > 0 and not at.equal) or self.values.fan_out.steps > 0
        return begun and not at.finished and self.rounds.diverges

    @property
    def replicas_differ(self) -> bool:
        """Whether replicas hold different state: weights in mid-round, or optimizer state that is never averaged."""
        at = self.at
        if at.step == 0:
            self.note_noise()
        own_state = not self.settings.averaging.state and at.step > 0 and not at.finished
        return self.mid_round or own_state or (at.noisy and self.rounds.diverges)

    def note_noise(self) -> None:
        """Before the first step, check whether a warm initialisation made the replicas different."""
        noisy = take_noise(self.settings.model, self.tensors.trained())
        if noisy:
            self.tensors.set_noisy(noisy)
            self.rounds.begin_noisy()

    def forget_noise(self) -> None:
        """Note that loaded or equal weights have replaced any initial noise."""
        take_noise(self.settings.model, self.tensors.trained())
        self.tensors.set_noisy(())

    # What all replicas must agree on

    def claims(self) -> Claims:
        """The values that must be equal on all replicas before the first step."""
        return self.settings.claims(self.replicas.size, self.at.step, self.tensors.followers_whole())

    def agree(self) -> None:
        """Compare the claims if there were no replicas yet when the ensemble was made; collective in that case."""
        if not self._agreed and self.replicas.ranks.size > 1:
            settle(self.replicas, "the first step of hdet.Ensemble", self.claims())
            self._agreed = True

    def diverged(self, what: str) -> RuntimeError:
        """The error that ends a diverged run."""
        place = (
            f" from {self.last_checkpoint}" if self.last_checkpoint else ", from your last checkpoint if there is one"
        )
        return RuntimeError(
            f"the run has diverged: {what} at step {self.at.step}. Start again with a lower learning rate"
            f"{place}, or let the run recover by itself: safety=hdet.Safety(rollback=True); hdet.find_lr finds a rate "
            "beforehand"
        )
