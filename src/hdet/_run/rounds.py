"""The run's position, its replicas, and which replica tries what in this round. No tensors, no traffic."""

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
    """The state of a run between two calls."""

    DEALT = auto()
    """Slots are dealt; the round's first step is not taken yet."""
    TRAINING = auto()
    """A round is under way."""
    FINISHED = auto()
    """There are no more rounds: steps are plain."""
    CONSENSUS = auto()
    """The model holds the average for a while: no step may be taken."""
    CLOSED = auto()
    """The ensemble is closed for good: steps are plain."""


@dataclass
class Position:
    """The run's progress.

    Attributes:
        step: optimizer steps taken.
        round: rounds ended.
        step_in_round: optimizer steps taken in this round.
        cut: this round did not start at its first step, so its scores do not count.
        noisy: the replicas started this round with different weights, so its average is applied in full.
        equal: the replicas are known to hold the same weights. Not saved: the weights are loaded separately.
        stage: which calls are allowed now; `enter()` writes it.
    """

    step: int = 0
    round: int = 0
    step_in_round: int = 0
    cut: bool = False
    noisy: bool = False
    equal: bool = False
    stage: Stage = Stage.DEALT
    _outside: Stage = Stage.DEALT  # the stage outside a consensus, or before close()

    def enter(self, stage: Stage) -> Stage:
        """Switch to another stage and return the previous one. CLOSED is final."""
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
        hyperparameters: the explored ones.
        interval: optimizer steps per round.
        total_steps: optimizer steps of the whole run, if known.
        seed: seed for dealing the slots.
        where: the replicas; by default all ranks.
        design: how slots are dealt to several hyperparameters.
        until: by name, the step at which a hyperparameter stops being explored.
        local: gradients are not shared, so replicas differ even with equal values.

    Attributes:
        at: the run's position.
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
        self._diverges: bool | None = None  # computed once per round, because every step reads it
        self._at_end = weakref.finalize(self, _warn_unfinished, self.at)

    @property
    def replicas(self) -> Replicas:
        """The replicas: looked up on each call before the first optimizer step, fixed from then on."""
        return self._replicas if self._replicas is not None else find_replicas(self._where)

    @property
    def diverges(self) -> bool:
        """Whether the replicas' weights diverge in this round."""
        return self._find_out() if self._diverges is None else self._diverges

    @property
    def explores(self) -> bool:
        """Whether the replicas try different values in this round, which gives a controller something to compare."""
        return self.diverges and bool(self._explored())

    def ever_explores(self, h: Hyperparameter) -> bool:
        """Whether replicas try different values of `h` in any round of the run."""
        return h.diverges and self._until.get(h.name) != 0

    @property
    def multipliers(self) -> dict[str, float]:
        """This replica's multipliers, by hyperparameter."""
        replicas = self.replicas
        dealt = self.dealt or self._deal(replicas)
        return {name: row[replicas.rank] for name, row in dealt.items()}

    def start(self) -> bool:
        """Fix the replicas and deal the first slots; False if already done."""
        if self._replicas is not None:
            return False
        self._replicas = find_replicas(self._where)
        if self.warns_alone and (self._local or self._explored()) and self._replicas.size == 1:
            warn(
                "there is only one replica, so the spread has no effect and this is plain training; launch several: "
                "with torchrun, after torch.distributed.init_process_group(); with `hdet train`, through --replicas"
            )
        self._deal_again()
        return True

    def begin_noisy(self) -> None:
        """Note that the replicas start the first round with different weights."""
        self.at.noisy = True
        self._deal_again()

    def count(self, steps: int) -> bool:
        """Count optimizer steps; return whether they complete the round."""
        at = self.at
        at.step += steps
        if at.finished:
            return False
        at.step_in_round += steps
        at.equal = not self.diverges
        return at.step_in_round >= self._interval or self.over

    def catch_up(self, step: int) -> None:
        """Advance to the step where the other replicas end this round."""
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
        """End the rounds: every multiplier is 1 from now on."""
        at = self.at
        at.step_in_round, at.cut, at.noisy, at.equal = 0, False, False, True
        at.enter(Stage.FINISHED)
        self._deal_again()

    def start_from(self, step: int) -> None:
        """Start at a step reached without an ensemble; the replicas must hold the same weights."""
        at = self.at
        at.step, at.round, at.step_in_round = step, step // self._interval, step % self._interval
        at.cut, at.noisy, at.equal = at.step_in_round > 0, False, step > 0
        self._go_on(finished=self.over)
        self._deal_again()

    def load_state_dict(self, state: Mapping[str, int | bool]) -> None:
        """Resume from `state_dict()`; if this run is longer than the saved one, it keeps exploring."""
        for key in _SAVED:
            setattr(self.at, key, state[key])
        self.at.equal = False
        self._go_on(finished=bool(state["finished"]) and (self._total_steps is None or self.over))
        self._deal_again()

    def state_dict(self) -> dict[str, int | bool]:
        """The progress, from which slots can be dealt again on any number of replicas."""
        return {**{key: getattr(self.at, key) for key in _SAVED}, "finished": self.at.finished}

    def close(self) -> None:
        """Release the process group; warn if the run ends in mid-round."""
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
        """The hyperparameters whose values differ between replicas in this round."""
        began = self.at.step - self.at.step_in_round
        return [h for h in self._hyperparameters if h.diverges and began < self._until.get(h.name, began + 1)]


def _warn_unfinished(at: Position) -> None:
    if at.step_in_round > 0 and not at.finished and not at.equal:
        warn("a run ended in mid-round: the replicas hold different weights; call ensemble.finish() at the end")
