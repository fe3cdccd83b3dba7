"""Which replicas count at the end of a round: those that are there and finite. The others are given the consensus.

Each replica says how it is in the one small vector that all gather anyway; from then on all know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hdet.board import counted, who
from hdet.converge import copy_from, layout
from hdet.guard.gradients import finite
from hdet.judge import Judged
from hdet.replicas import Replicas

_WELL, _SICK, _ENDED = 1.0, 0.0, -1.0
NUMBERS = 5  # how it is, steps skipped, the layout of its optimizer state, its step, whether its round is full


def condition(
    weights: Sequence[Tensor],
    state: Sequence[Tensor],
    skipped: Tensor | int,
    device: torch.device,
    *,
    ended: bool,
    step: int,
    full: bool,
) -> Tensor:
    """How this replica is, in `NUMBERS` numbers on `device`; looks at these weights and this state only."""
    vector = torch.tensor([_WELL, 0, layout(state), step, full], dtype=torch.float64, device=device)
    vector[0] = _ENDED if ended else finite([*weights, *state], device)
    vector[1] = skipped
    return vector


class Statistics:
    """A model's floating-point buffers as they were at the start of a round.

    A batch of NaN makes BatchNorm's statistics NaN although the step is skipped, and DDP gives the first replica's to
    all: weights that are finite are not to be given up for that.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    @torch.no_grad()
    def keep(self, buffers: Sequence[Tensor]) -> None:
        """Remember them, if they are finite."""
        if buffers and bool(finite(buffers, torch.device("cpu"))):
            self._kept = [b.detach().clone() for b in buffers]

    @torch.no_grad()
    def mend(self, buffers: Sequence[Tensor]) -> bool:
        """Put them back, if they are not finite and were; whether that was done."""
        same = [(b.shape, b.dtype) for b in buffers] == [(k.shape, k.dtype) for k in self._kept]
        if not (buffers and same) or bool(finite(buffers, torch.device("cpu"))):
            return False
        for buffer, kept in zip(buffers, self._kept, strict=True):
            buffer.copy_(kept)
        return True


@dataclass(frozen=True)
class Census:
    """How the replicas are, the same on every replica.

    Attributes:
        healthy: those that are averaged and judged.
        sick: those that are not finite somewhere.
        ended: those whose data have ended.
        skipped: by replica, the steps whose gradient was not finite.
        same_state: their optimizers hold the same kinds of state.
        step: the step of those whose data have not ended; the last one of all, if there are none.
        full: whether their round is full.
    """

    healthy: tuple[int, ...]
    sick: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()
    same_state: bool = True
    step: int = 0
    full: bool = False

    @property
    def all_well(self) -> bool:
        """Whether everybody counts."""
        return not self.sick and not self.ended

    @property
    def all_ended(self) -> bool:
        """Whether there is nobody left who trains."""
        return not self.healthy and not self.sick

    @property
    def lost(self) -> bool:
        """Whether somebody trains and nobody is healthy."""
        return bool(self.sick) and not self.healthy

    @property
    def averaged(self) -> tuple[int, ...] | None:
        """Those that are averaged; None for all."""
        return self.healthy or None if not self.all_well else None

    def losses(self, judged: Judged, guarded: bool) -> Sequence[float]:
        """What an alarm is to judge the round by; nothing if nobody trained, or no loss was given."""
        if self.all_ended or not (judged.given or self.lost):
            return ()
        if self.lost:
            return (math.nan,)
        left_out = guarded or not self.all_well
        return [s for s in judged.scores if math.isfinite(s) or not left_out] or (math.nan,)

    def stuck(self, steps: int) -> str:
        """Why none of the round's steps was taken by anybody; empty if one was."""
        if not steps or not self.skipped or min(self.skipped) < steps:
            return ""
        because = f"; {who(self.sick)} had a loss or weights that are not finite" if self.sick else ""
        return f"every step of the round was skipped ({steps} in all), as the gradient was not finite{because}"

    def view(self, judged: Judged) -> Judged:
        """What the controller is shown: no score of those that do not count."""
        if self.all_well:
            return judged
        hidden = [rank not in self.healthy for rank in range(len(judged.scores))]
        scores = tuple(math.nan if hide else s for hide, s in zip(hidden, judged.scores, strict=True))
        probe = judged.probe
        if probe is not None:
            probe = tuple(math.nan if hide else s for hide, s in zip(hidden, probe, strict=True))
        return judged._replace(scores=scores, probe=probe)

    def events(self, step: int) -> tuple[str, ...]:
        """What to tell."""
        said = []
        if any(self.skipped):
            most = max(self.skipped)
            where = "all replicas" if min(self.skipped) == most else who([r for r, n in enumerate(self.skipped) if n])
            said.append(f"guard: skipped {counted(most, 'step')} on {where}, as the gradient was not finite")
        if self.sick and self.healthy:
            said.append(f"guard: {who(self.sick)} was not finite at step {step} and got the average of the others")
        if self.ended:
            said.append(f"{who(self.ended)} had no more data before step {step} and got the average of the others")
        return tuple(said)


def take_census(table: Sequence[Sequence[float]], judged: Judged, guarded: bool) -> Census:
    """What the gathered conditions say, the last `NUMBERS` numbers of each row.

    A score that is not finite is a symptom too, unless that would leave nobody.
    """
    rows = [row[-NUMBERS:] for row in table]
    ended = tuple(rank for rank, row in enumerate(rows) if row[0] == _ENDED)
    sick = {rank for rank, row in enumerate(rows) if _SICK <= row[0] < _WELL}
    if guarded and judged.given:
        suspect = {rank for rank, score in enumerate(judged.scores) if not math.isfinite(score)} | sick
        sick = suspect if len(suspect - set(ended)) < len(rows) - len(ended) else sick
    healthy = tuple(rank for rank in range(len(rows)) if rank not in sick and rank not in ended)
    skipped = tuple(int(row[1]) for row in rows)
    same = len({row[2] for row in rows}) == 1
    present = [row for row in rows if row[0] != _ENDED]
    step, full = int(max(row[3] for row in present or rows)), bool(present) and all(row[4] for row in present)
    return Census(healthy, tuple(sorted(sick - set(ended))), ended, skipped, same, step, full)


def ended(row: Sequence[float]) -> bool:
    """Whether a replica that gathered this row has no more data."""
    return row[-NUMBERS] == _ENDED


def restore_state(census: Census, state: Sequence[Tensor], replicas: Replicas, own: bool = False) -> None:
    """Give all the optimizer state of a replica that counts, where others do not. Collective.

    Args:
        census: who counts.
        state: this replica's.
        replicas: all of them.
        own: each keeps its own: only those that do not count are given another's.
    """
    if census.healthy and census.same_state and state:
        copy_from(census.healthy[0], state, replicas, take=not own or replicas.rank not in census.healthy)
