"""Who tries which value: ladders of multipliers, and the slots that are dealt each round.

Everything here is a pure function of its arguments, so every replica computes the same answer without
traffic, and no global random generator is read or seeded.
"""

from __future__ import annotations

import hashlib
import math
from typing import Literal

from hdet.arguments import Rule, check_number

Ladder = Literal["linear", "log"]
Design = Literal["permutations", "orthogonal", "turns"]


def multipliers(size: int, spread: float, ladder: Ladder = "linear") -> list[float]:
    """The multipliers of `size` replicas, by slot, lowest first; their mean is 1.

    `linear` (the paper's), with spread `a` in [0, 1):
    ``rho_s = 1 + a (s - (N-1)/2) / max((N-1)/2, 1/2)``, so that rho lies in [1-a, 1+a].

    `log`, with spread `w` >= 1: log-uniform in [1/w, w], then divided by its mean.

    >>> multipliers(4, 0.3)
    [0.7, 0.9, 1.1, 1.3]
    """
    if ladder == "linear":
        middle = (size - 1) / 2
        half_width = max(middle, 0.5)
        return [1 + spread * (slot - middle) / half_width for slot in range(size)]
    rungs = [spread ** (2 * slot / (size - 1) - 1) for slot in range(size)] if size > 1 else [1.0]
    mean = sum(rungs) / size
    return [rung / mean for rung in rungs]


_SPREADS = {
    "linear": Rule(
        lambda x: 0 <= x < 1, "lie in [0, 1), where 0 is plain training", "0.1: rates from 0.9 to 1.1 times"
    ),
    "log": Rule(lambda x: 1 <= x < math.inf, "be at least 1, 1 for plain training", "2.0"),
}


def check_spread(spread: float, ladder: str, name: str = "spread") -> None:
    """Raise if `spread`, which the user knows as `name`, is not a spread of `ladder`."""
    if ladder not in _SPREADS:
        raise ValueError(f'ladder must be "linear" or "log", got {ladder!r}')
    check_number(name, spread, _SPREADS[ladder])


def slots(size: int, seed: int, round_index: int, name: str) -> list[int]:
    """The slot of every replica in one round for one hyperparameter: a fresh, uniform permutation.

    Counter-based: replicas are sorted by a hash of (seed, round, hyperparameter, replica). Different
    hyperparameters get independent permutations, so that their effects are not confounded.
    """

    def key(replica: int) -> bytes:
        counter = f"{seed}/{round_index}/{name}/{replica}".encode()
        return hashlib.blake2b(counter, digest_size=16).digest()

    order = sorted(range(size), key=key)
    dealt = [0] * size
    for slot, replica in enumerate(order):
        dealt[replica] = slot
    return dealt


def deal(
    size: int, seed: int, round_index: int, name: str, spread: float, ladder: Ladder = "linear"
) -> tuple[float, ...]:
    """The multipliers of one hyperparameter in one round, by replica."""
    rungs = multipliers(size, spread, ladder)
    return tuple(rungs[slot] for slot in slots(size, seed, round_index, name))
