"""Values that must be equal on all replicas: compared before averaging, and when a state is loaded."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hdet._explore.hyperparameter import Hyperparameter
from hdet._replicas import Replicas


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
    """A value that must be equal on every replica, with its name and what to do if it is not.

    A checksum is compared but not shown; an index into `words` is shown as the word.
    """

    name: str
    remedy: str
    value: float
    checksum: bool = False
    words: Sequence[str] = ()

    def show(self, value: float) -> str:
        """A replica's value in words."""
        return self.words[int(value)] if self.words else f"{value:.12g}"


def base_claims(hyperparameters: Sequence[Hyperparameter]) -> list[Claim]:
    """The bases one by one, to find the one that differs when their sum does."""
    return [Claim(f"the base of {h.name}", SAME_SCHEDULE, float(base)) for h in hyperparameters for base in h.bases()]


SAME_SCHEDULE = "a scheduler must see the same numbers everywhere: all-reduce the metric that it is given"


def checksum(values: Sequence[object]) -> int:
    """A number that tells lists of plain values apart."""
    return zlib.crc32(repr(values).encode())


def check_agreement(claims: Mapping[Claim, Sequence[float]], ranks: Sequence[int] | None = None) -> None:
    """Raise, with the same message on every replica, if the replicas make different claims.

    Args:
        claims: this replica's claims, with each replica's value.
        ranks: the replicas to compare; by default all.
    """
    for claim, told in claims.items():
        compared = range(len(told)) if ranks is None else ranks
        first = next(iter(compared), 0)
        odd = [rank for rank in compared if not same(told[rank], told[first])]
        if odd:
            each = [f"{claim.show(told[rank])} on replica {rank}" for rank in (first, odd[0])]
            differs = f"replica {odd[0]} differs from replica {first}" if claim.checksum else ", ".join(each)
            raise RuntimeError(f"the replicas disagree on {claim.name}: {differs}; {claim.remedy}")


def same(a: float, b: float) -> bool:
    """Whether two replicas' numbers are the same, up to the last digits of another machine's arithmetic."""
    return math.isclose(a, b, rel_tol=1e-12) or (math.isnan(a) and math.isnan(b))
