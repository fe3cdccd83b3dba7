"""Where the run is, who the replicas are, and who tries what in this round. No tensors, no traffic."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from hdet._explore.hyperparameter import Hyperparameter
from hdet._explore.slots import Design, deal_round
from hdet._replicas import Replicas, Where, find_replicas
from hdet._user_warning import warn


class Stage(Enum):
    """Where the run is, between two calls."""

    DEALT = auto()
    """A round is dealt; its first step has not been taken."""
    TRAINING = auto()
    """Steps of a round are taken."""
    FINISHED = auto()
    """There are no more rounds: steps are plain."""
    CONSENSUS = auto()
    """The model holds the average for a while: no step may be taken."""
    CLOSED = auto()
    """The ensemble is closed, for good: steps are plain."""


@dataclass
class Position:
    """Where the run is.

    Attributes:
        step: optimizer steps taken.
        round: rounds ended.
        step_in_round: optimizer steps of this round.
        cut: this round was not begun at its first step, so its scores do not count.
        noisy: the replicas began this round with weights of their own, so it ends in an average, taken whole.
        equal: the replicas are known to hold the same weights. Not saved: the weights are loaded apart.
        stage: what may be done now; `enter()` writes it.
    """

    step: int = 0
    round: int = 0
    step_in_round: int = 0
    cut: bool = False
    noisy: bool = False
    equal: bool = False
    stage: Stage = Stage.DEALT
    _outside: Stage = Stage.DEALT  # of a consensus, or of an ensemble that was closed

    def enter(self, stage: Stage) -> Stage:
        """Go to another stage; the one before, to come back to. There is no way back from CLOSED."""
        before = self.stage
        if before is not Stage.CLOSED:
            if before is not Stage.CONSENSUS:
                self._outside = before
            self.stage = stage
        return before

    @property
    def finished(self) -> bool:
        """Whether there are no more rounds."""
        return (self._outside if self.stage in _OVERLAYS else self.stage) is Stage.FINISHED

    @property
    def closed(self) -> bool:
        """Whether the ensemble is closed."""
        return self.stage is Stage.CLOSED


_OVERLAYS = (Stage.CONSENSUS, Stage.CLOSED)
_SAVED = ("step", "round", "step_in_round", "cut", "noisy")


class Rounds:
    """The rounds of one run, seen from one replica.

    Args:
        hyperparameters: what is explored.
        interval: optimizer steps per round.
        total_steps: optimizer steps of the whole run, if known.
        seed: what the slots are dealt from.
        where: the replicas; by default all ranks.
        design: how slots are dealt to several hyperparameters.
        until: by name, the step from which on a hyperparameter is not explored any more.
        local: the replicas differ even under the same values, as they do not share their gradients.

    Attributes:
        at: where the run is.
        dealt: this round's multipliers by hyperparameter and replica; the same on every replica.
        warns_alone: whether a single replica that was to explore gets a warning.
    """

    def __init__(
        self,
        hyperparameters: Sequence[Hyperparameter],
        interval: int,
        total_steps: int | None,
        seed: int,
        where: Where | None,
        *,
        design: Design = "permutations",
        until: Mapping[str, int] | None = None,
        local: bool = False,
    ) -> None:
        self.at = Position()
        self.dealt: dict[str, tuple[float, ...]] = {}
        self.warns_alone = True
        self._hyperparameters = tuple(hyperparameters)
        self._design, self._until, self._local = design, dict(until or {}), local
        self._interval = interval
        self._total_steps = total_steps
        self._seed = seed
        self._where = where
        self._replicas: Replicas | None = None
        self._diverges: bool | None = None  # settled when a round is dealt, as every step asks for it
        self._at_end = weakref.finalize(self, _warn_unfinished, self.at)

    @property
    def replicas(self) -> Replicas:
        """Who the replicas are: fixed by the first optimizer step, looked up anew before it."""
        return self._replicas if self._replicas is not None else find_replicas(self._where)

    @property
    def diverges(self) -> bool:
        """Whether the replicas come to hold different weights in this round."""
        return self._find_out() if self._diverges is None else self._diverges

    @property
    def explores(self) -> bool:
        """Whether the replicas try different values in this round, so that there is something to compare."""
        return self.diverges and bool(self._explored())

    def ever_explores(self, h: Hyperparameter) -> bool:
        """Whether replicas try different values of it in any round of the run."""
        return h.diverges and self._until.get(h.name) != 0

    @property
    def multipliers(self) -> dict[str, float]:
        """This replica's multipliers, by hyperparameter."""
        replicas = self.replicas
        dealt = self.dealt or self._deal(replicas)
        return {name: row[replicas.rank] for name, row in dealt.items()}

    def start(self) -> bool:
        """Fix who the replicas are and deal the first slots; False if that was done before."""
        if self._replicas is not None:
            return False
        self._replicas = find_replicas(self._where)
        if self.warns_alone and (self._local or self._explored()) and self._replicas.size == 1:
            warn(
                "there is one replica only, so the spread has no effect and this is plain training; launch several: "
                "with torchrun, and torch.distributed.init_process_group() first; with `hdet train`, by --replicas"
            )
        self._deal_again()
        return True

    def begin_noisy(self) -> None:
        """The replicas begin the first round with weights of their own."""
        self.at.noisy = True
        self._deal_again()

    def count(self, steps: int) -> bool:
        """Count optimizer steps; whether the round ends with them."""
        at = self.at
        at.step += steps
        if at.finished:
            return False
        at.step_in_round += steps
        at.equal = not self.diverges
        return at.step_in_round >= self._interval or self.over

    def catch_up(self, step: int) -> None:
        """Go to the step where the others end this round."""
        self.at.step_in_round += step - self.at.step
        self.at.step = step

    @property
    def full(self) -> bool:
        """Whether this round has all its steps."""
        return self.at.step_in_round >= self._interval and not self.at.cut

    @property
    def over(self) -> bool:
        """Whether the run has all its steps."""
        return self._total_steps is not None and self.at.step >= self._total_steps

    def next_round(self) -> None:
        """End this round and deal the next one."""
        at = self.at
        at.round, at.step_in_round, at.cut, at.noisy = at.round + 1, 0, False, False
        self._deal_again()

    def finish(self) -> None:
        """No more rounds: every multiplier is 1 from now on."""
        at = self.at
        at.step_in_round, at.cut, at.noisy, at.equal = 0, False, False, True
        at.enter(Stage.FINISHED)
        self._deal_again()

    def start_from(self, step: int) -> None:
        """Go to a step that was reached without an ensemble, by replicas that hold the same weights."""
        at = self.at
        at.step, at.round, at.step_in_round = step, step // self._interval, step % self._interval
        at.cut, at.noisy, at.equal = at.step_in_round > 0, False, step > 0
        self._go_on(finished=self.over)
        self._deal_again()

    def load_state_dict(self, state: Mapping[str, int | bool]) -> None:
        """Go on from `state_dict()`; a longer run than the one that was saved goes on exploring."""
        for key in _SAVED:
            setattr(self.at, key, state[key])
        self.at.equal = False
        self._go_on(finished=bool(state["finished"]) and (self._total_steps is None or self.over))
        self._deal_again()

    def state_dict(self) -> dict[str, int | bool]:
        """The progress. The slots are dealt again from it, on any number of replicas."""
        return {**{key: getattr(self.at, key) for key in _SAVED}, "finished": self.at.finished}

    def close(self) -> None:
        """Give back the process group, and warn if the run ends in mid-round."""
        if self._replicas is not None:
            self._replicas.close()
        self._at_end()

    def _go_on(self, finished: bool) -> None:
        begun = Stage.TRAINING if self.at.step_in_round else Stage.DEALT
        self.at.enter(Stage.FINISHED if finished else begun)

    def _deal_again(self) -> None:
        if self._replicas is not None:
            self.dealt = self._deal(self._replicas)
            self._diverges = self._find_out()

    def _find_out(self) -> bool:
        if self.at.finished or self.replicas.size == 1:
            return False
        return self._local or self.at.noisy or bool(self._explored())

    def _deal(self, replicas: Replicas) -> dict[str, tuple[float, ...]]:
        dealt = {h.name: (1.0,) * replicas.size for h in self._hyperparameters}
        rows = [(h.name, h.spread, h.ladder) for h in self._explored()]
        if rows and not self.at.finished:
            dealt |= deal_round(replicas.size, self._seed, self.at.round, rows, self._design)
        return dealt

    def _explored(self) -> list[Hyperparameter]:
        """What the replicas try different values of in this round."""
        began = self.at.step - self.at.step_in_round
        return [h for h in self._hyperparameters if h.diverges and began < self._until.get(h.name, began + 1)]


def _warn_unfinished(at: Position) -> None:
    if at.step_in_round > 0 and not at.finished and not at.equal:
        warn("a run ended in mid-round: the replicas hold different weights; call ensemble.finish() at the end")
