"""What must be the same on all replicas: compared before anything is averaged, and when a state is loaded."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hdet.board import same_calls
from hdet.hyperparameters.hyperparameter import Hyperparameter
from hdet.replicas import Replicas


def check_same_replica(saved: dict[str, Any], replicas: Replicas) -> None:
    """Raise unless a state that was `saved` in mid-round is this replica's own."""
    if (saved["replica"], saved["replicas"]) != (replicas.rank, replicas.size):
        raise ValueError(
            f"this state was saved in mid-round by replica {saved['replica']} of {saved['replicas']} and belongs to "
            f"it; this is replica {replicas.rank} of {replicas.size}. Load each replica's own file on the same number "
            "of replicas, or save at a round's end (after ensemble.converge()), which loads anywhere"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Claim:
    """Something that must be the same on every replica: what it is, what to do if not, and its value here.

    A value that is a checksum is compared and not shown; one that counts `words` is shown as one of them.
    """

    name: str
    remedy: str
    value: float
    checksum: bool = False
    words: Sequence[str] = ()

    def show(self, value: float) -> str:
        """A replica's value of this."""
        return self.words[int(value)] if self.words else f"{value:.12g}"


Call = Literal["the end of a round", "ensemble.converge()", "ensemble.finish()", "ensemble.consensus()"]
"""What has brought a replica to where all are compared."""


def agree(
    replicas: Replicas,
    call: Call,
    step: int,
    layout: int,
    options: Sequence[object],
    hyperparameters: Sequence[Hyperparameter],
    numbers: Tensor,
    ended: Callable[[Sequence[float]], bool] = lambda row: False,
) -> list[list[float]]:
    """Check that all replicas are at the same place with the same tensors; every replica's `numbers`, by replica.

    One collective where they agree.

    Args:
        replicas: who.
        call, step, layout, options, hyperparameters: what must be the same.
        numbers: what else this replica has to say.
        ended: whether a replica with these numbers may be elsewhere.
    """
    mine = claims(call, step, layout, options, hyperparameters)

    def gather(claims: Sequence[Claim], more: Tensor) -> list[list[float]]:
        values = torch.tensor([c.value for c in claims], dtype=torch.float64, device=more.device)
        return replicas.gather(torch.cat([values, more]))

    table = gather(mine, numbers)
    *others, _ = mine
    present = [rank for rank, row in enumerate(table) if not ended(row)]
    check_agreement(table, others, present)
    totals = [table[rank][len(others)] for rank in present]
    if not all(same(total, totals[0]) for total in totals):  # name the one that differs
        each = base_claims(hyperparameters)
        check_agreement(gather(each, numbers[:0]), each, present)
        check_agreement(table, mine, present)
    return [row[len(mine) :] for row in table]


def claims(
    call: Call, step: int, layout: int, options: Sequence[object], hyperparameters: Sequence[Hyperparameter]
) -> list[Claim]:
    """What the replicas compare before they average. Always as many, whatever the replica was given."""
    explored = [(h.name, h.spread, h.ladder, len(list(h.bases()))) for h in hyperparameters]
    total = math.fsum(claim.value for claim in base_claims(hyperparameters))
    return [
        Claim("the call", same_calls(), get_args(Call).index(call), words=get_args(Call)),
        Claim("the step", _SAME_STEPS, step),
        Claim("the tensors to average", "build the same model and optimizer", layout, checksum=True),
        Claim("the ensemble's options", _SAME_ARGUMENTS, checksum([*options, *explored]), checksum=True),
        Claim("the sum of all bases", _SAME_SCHEDULE, total),
    ]


def base_claims(hyperparameters: Sequence[Hyperparameter]) -> list[Claim]:
    """The bases one by one, to find the one that differs when their sum does."""
    return [Claim(f"the base of {h.name}", _SAME_SCHEDULE, float(base)) for h in hyperparameters for base in h.bases()]


_SAME_STEPS = "every replica must take the same number of steps; for data that end unevenly use `with ensemble.join():`"
_SAME_ARGUMENTS = "give every replica the same arguments"
_SAME_SCHEDULE = "a scheduler must see the same numbers everywhere: all-reduce the metric that it is given"


def checksum(values: Sequence[object]) -> int:
    """A number that tells lists of plain values apart."""
    return zlib.crc32(repr(values).encode())


def check_agreement(
    table: Sequence[Sequence[float]], claims: Sequence[Claim], ranks: Sequence[int] | None = None
) -> None:
    """Raise, with the same message on every replica, if the replicas make different claims.

    Args:
        table: one row per replica, beginning with the values of its claims.
        claims: this replica's.
        ranks: the replicas that are compared; by default all.
    """
    compared = range(len(table)) if ranks is None else ranks
    for index, claim in enumerate(claims):
        values = {rank: table[rank][index] for rank in compared}
        first = next(iter(values), 0)
        odd = [rank for rank, value in values.items() if not same(value, values[first])]
        if odd:
            each = [f"{claim.show(values[rank])} on replica {rank}" for rank in (first, odd[0])]
            told = f"replica {odd[0]} differs from replica {first}" if claim.checksum else ", ".join(each)
            raise RuntimeError(f"the replicas disagree on {claim.name}: {told}; {claim.remedy}")


def same(a: float, b: float) -> bool:
    """Whether two replicas' numbers are the same, up to the last digits of another machine's arithmetic."""
    return math.isclose(a, b, rel_tol=1e-12) or (math.isnan(a) and math.isnan(b))
