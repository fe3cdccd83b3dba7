"""The end of a round: `Round` is the phases' shared data, `Phase` their interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from hdet._probe.score import Loss
from hdet._replicas.claims import Claim

State = dict[str, Any]
Call = Literal["the end of a round", "ensemble.converge()", "ensemble.finish()", "ensemble.consensus()"]
"""The call that brought a replica to the comparison."""


@dataclass(eq=False, kw_only=True)
class Round:
    """One round at its end. Phases store here what later phases need.

    Attributes:
        call: the call that ended the round.
        number, step, steps: the round's number, the run's step, and the steps in this round.
        full: whether the round has all its steps.
        last: whether the run ends with it.
        compares: whether the replicas gather their numbers; if not, each uses its own.
        explores: whether the replicas tried different values.
        device: device of the numbers until they are gathered.
        replicas: number of replicas.
        began: when the end of the round started, by `time.perf_counter()`.

        recorded: whether any sink takes the record (recording).
        gone: this replica's data have ended (uneven data).
        ended: the replicas whose data have ended (uneven data).
        tensors: the tensors to average (averaging, unless already set by the caller that compares the replicas).
        given: whether every replica was given a loss (scores).
        all_scores: the replicas' mean training losses (scores).
        scores: the same, NaN for replicas that do not count (scores, then guard).
        probe: the replicas' losses on the probe (scores, then guard).
        start: probe loss of the weights at the start of the round (scores).
        early, first: mean of the round's first losses, and of the run's first step (scores).
        loss, loss_steps: if nothing is gathered, this replica's own loss and the steps that it covers (scores).
        probe_seconds_at_end: time spent on the probe since the round ended (scores).
        score_probe: returns the loss of weights that all replicas hold, on the probe of a number (scores).
        healthy, sick: the replicas that count, and those that are not finite (guard).
        lost: why no replica counts, if none does (guard).
        losses: the losses that the run is judged by; empty if no replica trained or no loss was given (guard).
        alarm: why the run returns to its best weights (rollback).
        cut: factor on the learning rates in that case (rollback).
        scales: the scales used in the round, by hyperparameter (control).
        record: fields of the round's `RoundRecord`, from every phase.
        events: events in words, from every phase.
    """

    call: Call
    number: int
    step: int
    steps: int
    full: bool
    last: bool
    compares: bool
    explores: bool
    device: torch.device
    replicas: int
    began: float

    recorded: bool = False
    gone: bool = False
    ended: tuple[int, ...] = ()
    tensors: Sequence[Tensor] | None = None
    given: bool = True
    all_scores: tuple[float, ...] = ()
    scores: tuple[float, ...] = ()
    probe: tuple[float, ...] | None = None
    start: float | None = None
    early: float | None = None
    first: float | None = None
    loss: float | None = None
    loss_steps: int = 0
    probe_seconds_at_end: float = 0.0
    score_probe: Callable[[int], float] | None = None
    healthy: tuple[int, ...] = ()
    sick: tuple[int, ...] = ()
    lost: str = ""
    losses: Sequence[float] = ()
    alarm: str = ""
    cut: float = 1.0
    scales: Mapping[str, float] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)

    claims: list[Claim] = field(default_factory=list)
    _told: dict[str, Tensor] = field(default_factory=dict)
    _heard: dict[str, list[list[float]]] = field(default_factory=dict)

    @property
    def averaged(self) -> tuple[int, ...] | None:
        """The replicas whose tensors count; None for all."""
        return None if not (self.sick or self.ended) else self.healthy or None

    @property
    def present(self) -> list[int]:
        """The replicas whose data have not ended."""
        return [rank for rank in range(self.replicas) if rank not in self.ended]

    def claim(self, *claims: Claim) -> None:
        """Add values that must be equal on all replicas."""
        self.claims += claims

    def tell(self, name: str, numbers: Tensor | Sequence[float]) -> None:
        """Send numbers to the other replicas: under one name always the same count, on every replica."""
        self._told[name] = torch.as_tensor(numbers, dtype=torch.float64).to(self.device)

    def heard(self, name: str) -> list[list[float]]:
        """The numbers that all replicas sent under that name, one row each."""
        return self._heard[name]

    def gather(self, gather: Callable[[Tensor], Sequence[Sequence[float]]]) -> None:
        """Exchange all numbers, in one collective."""
        self.tell(_CLAIMS, [claim.value for claim in self.claims])
        table = gather(torch.cat(list(self._told.values())))
        at = 0
        for name, numbers in self._told.items():
            self._heard[name] = [list(row[at : at + len(numbers)]) for row in table]
            at += len(numbers)

    @property
    def heard_claims(self) -> list[list[float]]:
        """The values of all replicas' claims."""
        return self._heard[_CLAIMS]


_CLAIMS = "claims"


class Phase:
    """One concern at the end of a round, with all its code in one file. Every method is optional.

    The phases of an ensemble form one list (`hdet._engine.assembly`). Each method runs for all of them in that order
    before the next method runs for any. Phases pass data on through fields of the `Round`.

    Attributes:
        name: unique name of its numbers and its state.
        holds_weights: whether its state has weights, which are the same on all replicas even in mid-round.
    """

    name = ""

    @property
    def holds_weights(self) -> bool:
        return False

    # While a round is trained

    def step(self, loss: Loss | None) -> None:
        """`Ensemble.step()` was called, with a loss or none. No collective, nothing read from a device."""

    def counted(self) -> None:
        """Optimizer steps were counted."""

    def ends_round(self) -> bool:
        """Whether the round must end now, before it is full: the same on all replicas."""
        return False

    def begin(self) -> None:
        """Before the first step of a round, while all replicas hold the same weights."""

    # When it ends

    def prepare(self, rnd: Round) -> None:
        """Prepare this replica's state for the comparison."""

    def tell(self, rnd: Round) -> None:
        """Send what the other replicas need: `rnd.tell()`, `rnd.claim()`."""

    def hear(self, rnd: Round) -> None:
        """Read the gathered numbers: `rnd.heard()`. Changes only the round; `consensus()` calls it too."""

    def decide(self, rnd: Round) -> None:
        """Judge the round; may set `rnd.alarm`, the same on all replicas."""

    def after(self, rnd: Round) -> None:
        """Act on the decision. May be collective."""

    def undone(self, rnd: Round) -> None:
        """Called instead of `after()` if there is an alarm: the round does not count, and the run rolls back."""

    def finish(self, rnd: Round) -> None:
        """The run ends with this round."""

    def dealt(self, first: bool) -> None:
        """A new round is dealt; the run's `first` one right before its first step."""

    def ended(self, rnd: Round) -> None:
        """The round is over, and the next one is dealt."""

    # Beside the rounds

    def join(self) -> None:
        """Data may end at different steps from now on: raise if that is impossible."""

    def release(self) -> None:
        """The ensemble is closed: remove hooks and free memory."""

    # What is saved

    def state_dict(self) -> State:
        """The state that cannot be recomputed."""
        return {}

    def own_state_dict(self) -> State:
        """The state that differs between replicas even if all hold the same weights."""
        return {}

    def check_state(self, state: State) -> None:
        """Raise if `load_state_dict()` cannot use this state."""

    def load_state_dict(self, state: State, own: State) -> None:
        """Resume from `state_dict()` and `own_state_dict()`; each is empty if nothing was saved."""

    def resumed(self) -> None:
        """The run is at another step now, and every part has loaded its state or started over."""

    def weights_loaded(self) -> None:
        """A module has loaded other weights."""

    def reset(self) -> None:
        """Start over, whatever step the run is at."""
