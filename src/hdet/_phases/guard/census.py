"""Which replicas count at the end of a round: those present and finite. The others receive the consensus.

Each replica adds its condition to the one small vector that all gather anyway.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hdet._replicas import Replicas
from hdet._replicas.store import counted, who
from hdet._tensors.converge import copy_from, layout
from hdet._tensors.finite import flags, looked_at


class Condition(NamedTuple):
    """One replica's condition, as numbers to send.

    Attributes:
        well: whether everything that the guard watches is finite.
        skipped: steps with a gradient that was not finite.
        layout: layout of its optimizer state.
        odd: index in `looked_at()` of the first tensor that is not finite; -1 for none.
        spoiled: index of the first statistic that was finite at the round's start and is not now; -1 for none.
        several: number of such statistics.
        left: number of these without a finite value to restore.
    """

    well: float
    skipped: float
    layout: float
    odd: float = -1.0
    spoiled: float = -1.0
    several: float = 0.0
    left: float = 0.0


def condition(
    tensors: Sequence[Tensor],
    state: Sequence[Tensor],
    spoiled: Tensor,
    skipped: Tensor | int,
    device: torch.device,
) -> Tensor:
    """This replica's `Condition` on `device`, without a host read.

    Args:
        tensors: the tensors to check, optimizer state included.
        state: all optimizer state.
        spoiled: its statistics; see `Statistics.spoiled`.
        skipped: steps with a gradient that was not finite.
        device: device of the result.
    """
    vector = torch.tensor(Condition(1.0, 0.0, layout(state)), dtype=torch.float64, device=device)
    fine = flags(tensors, device)
    vector[0] = fine.all()
    vector[1] = skipped
    vector[3] = first(~fine)
    vector[4:] = spoiled.to(device)
    return vector


def first(odd: Tensor) -> Tensor:
    """The index of the first true entry; -1 if there is none. No host read."""
    if not odd.numel():
        return torch.tensor(-1, device=odd.device)
    return torch.where(odd.any(), odd.to(torch.int32).argmax(), -1)


class Spoiled(NamedTuple):
    """The spoiled statistics.

    Attributes:
        number: index of the first one in `looked_at()`; -1 for none.
        several: number of spoiled statistics.
        left: number of these without a finite value to restore.
    """

    number: int
    several: int
    left: int


NOT_SPOILED = Spoiled(-1, 0, 0)
Moment = Literal["round", "loaded", "late"]


class Statistics:
    """Tensors that can be spoiled without showing in the loss, such as a model's floating-point buffers.

    A batch of NaN makes BatchNorm's statistics NaN even if the step is skipped, and DDP copies the first replica's to
    all. Finite weights should not be lost for that. Values that were not finite before the round, such as a mask of
    minus infinity, are taken as intended.

    Args:
        mends: keep a copy to restore spoiled statistics from.
    """

    def __init__(self, mends: bool) -> None:
        self._mends = mends
        self._layout: list[tuple[torch.Size, torch.dtype]] = []
        self._fine: Tensor | None = None  # which were finite once
        self._good: Tensor | None = None  # whose copies are finite
        self._copies: list[Tensor] = []

    @torch.no_grad()
    def keep(self, tensors: Sequence[Tensor], moment: Moment = "round") -> None:
        """Remember the current values.

        Args:
            tensors: the statistics.
            moment: "round" at the start of one; "loaded" after loading, which may have spoiled finite ones; or "late",
                after a first forward pass, which may have spoiled them.
        """
        found, known = looked_at(tensors), self._fine is not None and self._fits(tensors)
        fine = flags(tensors, tensors[0].device) if tensors else None
        good, copies = fine, [t.detach().clone() for t in found] if self._mends else []
        if moment != "round" and known and fine is not None and self._fine is not None:
            if moment == "late" and self._mends and self._good is not None:
                for number, (new, old) in enumerate(zip(copies, self._copies, strict=True)):
                    copies[number] = torch.where(fine[number].to(new.device), new, old.to(new.device))
                good = fine | self._good.to(fine.device)
            fine = fine | self._fine.to(fine.device)
        self._layout, self._fine, self._good, self._copies = [(t.shape, t.dtype) for t in tensors], fine, good, copies

    @torch.no_grad()
    def mend(self, tensors: Sequence[Tensor]) -> Spoiled:
        """Restore spoiled statistics that have a finite copy. Reads from the device."""
        odd = self._odd(tensors)
        if odd is None or self._good is None:
            return NOT_SPOILED
        numbers = odd.nonzero().flatten().tolist()
        if not numbers:
            return NOT_SPOILED
        good, found = self._good.tolist(), looked_at(tensors)
        for number in numbers:
            if good[number]:
                found[number].copy_(self._copies[number])
        self._fine = self._good  # report those without a finite copy once
        return Spoiled(numbers[0], len(numbers), sum(not good[number] for number in numbers))

    def spoiled(self, tensors: Sequence[Tensor]) -> Tensor:
        """A `Spoiled` for statistics that were finite and no longer are. No host read."""
        odd = self._odd(tensors)
        if odd is None:
            return torch.tensor(NOT_SPOILED)
        return torch.stack([first(odd), odd.sum(), torch.zeros_like(odd.sum())])

    def _odd(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Which of `looked_at()` were finite and no longer are; None if their earlier values are unknown."""
        if self._fine is None or not self._fits(tensors):
            self.forget()
            return None
        fine = flags(tensors, self._fine.device)
        odd = self._fine & ~fine
        self._fine = self._fine | fine
        return odd

    @property
    def kept(self) -> bool:
        """Whether earlier values are known."""
        return self._fine is not None

    def forget(self) -> None:
        """Forget the values: the statistics were replaced, or are spoiled for good."""
        self._fine = None

    def were_finite(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The statistics that were finite at the start of the round. Reads from the device."""
        if self._fine is None or not self._fits(tensors):
            return list(tensors)
        return [t for t, fine in zip(looked_at(tensors), self._fine.tolist(), strict=True) if fine]

    def _fits(self, tensors: Sequence[Tensor]) -> bool:
        return [(t.shape, t.dtype) for t in tensors] == self._layout


@dataclass(frozen=True)
class Census:
    """The condition of all replicas, the same on every replica.

    Attributes:
        healthy: replicas that are averaged and judged.
        sick: replicas with anything not finite.
        ended: replicas whose data have ended.
        skipped: by replica, the steps with a gradient that was not finite.
        same_state: whether their optimizers hold the same kinds of state.
        odd: by sick replica, index of the first checked tensor that is not finite; -1 if only its score is not.
        spoiled: by replica, the statistics spoiled in this round.
    """

    healthy: tuple[int, ...]
    sick: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()
    same_state: bool = True
    odd: Mapping[int, int] = field(default_factory=dict)
    spoiled: Mapping[int, Spoiled] = field(default_factory=dict)

    @property
    def all_well(self) -> bool:
        """Whether everybody counts."""
        return not self.sick and not self.ended

    @property
    def all_ended(self) -> bool:
        """Whether no replica trains any more."""
        return not self.healthy and not self.sick

    @property
    def lost(self) -> bool:
        """Whether replicas train and none is healthy."""
        return bool(self.sick) and not self.healthy

    def losses(self, scores: Sequence[float], given: bool, guarded: bool) -> Sequence[float]:
        """The losses for the alarm to judge the round by; empty if no replica trained or no loss was `given`."""
        if self.all_ended or not (given or self.lost):
            return ()
        if self.lost:
            return (math.nan,)
        left_out = guarded or not self.all_well
        return [s for s in scores if math.isfinite(s) or not left_out] or (math.nan,)

    def stuck(self, steps: int) -> str:
        """Why no replica took any of the round's steps; empty if one did."""
        if not steps or not self.skipped or min(self.skipped) < steps:
            return ""
        because = f"; {who(self.sick)} had a loss or weights that are not finite" if self.sick else ""
        return f"every step of the round was skipped ({steps} in all), as the gradient was not finite{because}"

    def shown(self, scores: Sequence[float]) -> tuple[float, ...]:
        """The scores for the controller, without those of replicas that do not count."""
        if self.all_well:
            return tuple(scores)
        return tuple(score if rank in self.healthy else math.nan for rank, score in enumerate(scores))

    def events(self, step: int) -> list[str]:
        """What to tell."""
        said = []
        if any(self.skipped):
            most = max(self.skipped)
            where = "all replicas" if min(self.skipped) == most else who([r for r, n in enumerate(self.skipped) if n])
            said.append(f"guard: skipped {counted(most, 'step')} on {where}, as the gradient was not finite")
        if self.sick and self.healthy:
            said.append(f"guard: {who(self.sick)} was not finite at step {step} and got the average of the others")
        return said


def take_census(
    table: Sequence[Sequence[float]], ended: Sequence[int], scores: Sequence[float], by_scores: bool
) -> Census:
    """Derive the census from all replicas' conditions.

    A replica is also sick if it has statistics that cannot be restored or, with `by_scores`, a score that is not
    finite, unless that would leave no healthy replica.

    Args:
        table: a `Condition` of each replica.
        ended: replicas whose data have ended.
        scores: mean loss of each replica.
        by_scores: whether scores count as symptoms.
    """
    rows = [Condition(*row) for row in table]
    sick = {rank for rank, row in enumerate(rows) if not row.well} - set(ended)
    symptoms = [{rank for rank, row in enumerate(rows) if row.left}]
    if by_scores:
        symptoms.append({rank for rank, score in enumerate(scores) if not math.isfinite(score)})
    for found in symptoms:
        suspect = (found | sick) - set(ended)
        sick = suspect if len(suspect) < len(rows) - len(ended) else sick
    return Census(
        healthy=tuple(rank for rank in range(len(rows)) if rank not in sick and rank not in ended),
        sick=tuple(sorted(sick)),
        ended=tuple(ended),
        skipped=tuple(int(row.skipped) for row in rows),
        same_state=len({row.layout for row in rows}) == 1,
        odd={rank: int(rows[rank].odd) for rank in sorted(sick)},
        spoiled={
            rank: Spoiled(int(row.spoiled), int(row.several), int(row.left))
            for rank, row in enumerate(rows)
            if row.several
        },
    )


def restore_state(census: Census, state: Sequence[Tensor], replicas: Replicas, own: bool = False) -> None:
    """If some replicas do not count, copy the optimizer state of one that does. Collective.

    Args:
        census: says which replicas count.
        state: this replica's state.
        replicas: all replicas.
        own: replicas keep their own state, so only those that do not count get a copy.
    """
    if census.healthy and census.same_state and state:
        copy_from(census.healthy[0], state, replicas, take=not own or replicas.rank not in census.healthy)
