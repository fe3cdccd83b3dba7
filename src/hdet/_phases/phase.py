"""The end of a round: `Round` is what the phases work on, `Phase` says what each of them may do."""

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
"""What has brought a replica to where all are compared."""


@dataclass(eq=False, kw_only=True)
class Round:
    """One round that ends. A phase leaves here what later phases need.

    Attributes:
        call: what ended it.
        number, step, steps: of the round, of the run, and how many this round has.
        full: whether the round has all its steps.
        last: whether the run ends with it.
        compares: whether the replicas gather what they tell; if not, each goes by what it knows.
        explores: whether the replicas tried different values.
        device: where what is told lives until it is gathered.
        replicas: how many there are.
        began: when the round began to end, by `time.perf_counter()`.

        recorded: whether somebody takes the record (recording).
        gone: this replica's data have ended (uneven data).
        ended: the replicas whose data have ended (uneven data).
        tensors: what is averaged (averaging, unless whoever compares the replicas has said).
        given: whether every replica was given a loss (scores).
        all_scores: the replicas' mean training losses (scores).
        scores: the same, NaN for those that do not count (scores, then guard).
        probe: their losses on the probe (scores, then guard).
        start: the loss on it of the weights that the round began with (scores).
        early, first: the mean of the round's first losses, and of the run's first step (scores).
        loss, loss_steps: where nothing is gathered, this replica's own loss and how many steps it covers (scores).
        probe_seconds_at_end: time on the probe since the round has ended (scores).
        score_probe: returns the loss of weights that all replicas hold, on the probe of a number (scores).
        healthy, sick: the replicas that count, and those that are not finite (guard).
        lost: why no replica counts, if none does (guard).
        losses: what the run is judged by: nothing if nobody trained or no loss was given (guard).
        alarm: why the run goes back to its best weights (rollback).
        cut: what the learning rates are multiplied by then (rollback).
        scales: those that the round was trained with, by hyperparameter (control).
        record: fields of the round's `RoundRecord`, from every phase.
        events: what to tell in words, from every phase.
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
        """Tell what must be the same on all replicas."""
        self.claims += claims

    def tell(self, name: str, numbers: Tensor | Sequence[float]) -> None:
        """Tell the other replicas some numbers: always as many under one name, on every replica."""
        self._told[name] = torch.as_tensor(numbers, dtype=torch.float64).to(self.device)

    def heard(self, name: str) -> list[list[float]]:
        """What all replicas have told under that name, a row each."""
        return self._heard[name]

    def gather(self, gather: Callable[[Tensor], Sequence[Sequence[float]]]) -> None:
        """Exchange all that was told. One collective."""
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
    """One concern at the end of a round, with all its code in one file. Each method may be left out.

    The phases of an ensemble are in one list (`hdet._engine.assembly`), and each method is called for all of them in
    that order before the next method is called for any. What one phase leaves for the next is a field of the `Round`.

    Attributes:
        name: what its numbers and its state are called; of its own.
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
        """Whether the round is to end now, before it is full: the same on all replicas."""
        return False

    def begin(self) -> None:
        """Before the first step of a round, while all replicas hold the same weights."""

    # When it ends

    def prepare(self, rnd: Round) -> None:
        """Put in order what the round has left."""

    def tell(self, rnd: Round) -> None:
        """Say what the other replicas must know: `rnd.tell()`, `rnd.claim()`."""

    def hear(self, rnd: Round) -> None:
        """Read what all have told: `rnd.heard()`. Changes nothing but the round; `consensus()` calls it too."""

    def decide(self, rnd: Round) -> None:
        """Judge the round; may set `rnd.alarm`, the same on all replicas."""

    def after(self, rnd: Round) -> None:
        """Do what is to be done. May be collective."""

    def undone(self, rnd: Round) -> None:
        """The same where there is an alarm: the round does not count, and the run goes back."""

    def finish(self, rnd: Round) -> None:
        """The run ends with this round."""

    def dealt(self, first: bool) -> None:
        """A new round is dealt, the run's `first` one right before its first step."""

    def ended(self, rnd: Round) -> None:
        """The round is over, and the next one is dealt."""

    # Beside the rounds

    def join(self) -> None:
        """Data may end at different steps from now on: raise if that cannot be."""

    def release(self) -> None:
        """The ensemble is closed: leave nothing behind."""

    # What is saved

    def state_dict(self) -> State:
        """What cannot be recomputed."""
        return {}

    def own_state_dict(self) -> State:
        """The same of what is this replica's own, even while all replicas hold the same weights."""
        return {}

    def check_state(self, state: State) -> None:
        """Raise if `load_state_dict()` could not go on from this."""

    def load_state_dict(self, state: State, own: State) -> None:
        """Go on from `state_dict()` and `own_state_dict()`; each is empty where nothing was saved."""

    def resumed(self) -> None:
        """The run is at another step now: every part has loaded its state, or begun anew."""

    def weights_loaded(self) -> None:
        """A module was given other weights."""

    def reset(self) -> None:
        """Begin anew, at whatever step the run is."""
