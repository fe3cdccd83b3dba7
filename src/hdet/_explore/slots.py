"""Who tries which value: ladders of multipliers, and how they are dealt each round (`deal_round`).

All functions here are pure, so every replica computes the same answer without communication, and no global random
generator is read or seeded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Literal, get_args

from hdet._arguments import Rule, check_number
from hdet._explore.hadamard import balanced_column, count_columns

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

    order = sorted(range(size), key=lambda replica: _hash(seed, round_index, name, replica))
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


def check_design(design: Design) -> Design:
    """The design, if there is one of that name."""
    if design not in get_args(Design):
        raise ValueError(
            f'design must be "permutations", "orthogonal" or "turns", got {design!r}; write for example "orthogonal"'
        )
    return design


def deal_round(
    size: int, seed: int, round_index: int, explored: Sequence[tuple[str, float, Ladder]], design: Design
) -> dict[str, tuple[float, ...]]:
    """The multipliers of one round, by hyperparameter and replica. The mean of each hyperparameter's is 1.

    Args:
        size: the number of replicas.
        seed: seed of the draw, together with `round_index`.
        round_index: rounds before this one.
        explored: name, spread and ladder of every hyperparameter. Those without a spread stay at 1 and cost nothing.
        design: how they are dealt.

            - `permutations` (the paper's): each has a permutation of its whole ladder, independent of the others'.
              Two permutations of 8 replicas correlate by 0.3 on average, so estimated effects leak into each other.
            - `orthogonal`: every replica is at one of the two ends of each ladder, by columns of a Hadamard matrix, so
              that effects are told apart exactly and each is seen at its widest. See `_orthogonal`.
            - `turns`: round k explores the (k mod H)-th of H, by a permutation of its ladder; the others stay at 1.
    """
    check_design(design)
    dealt = {name: (1.0,) * size for name, _, _ in explored}
    wide = [entry for entry in explored if entry[1] > (0 if entry[2] == "linear" else 1)]
    if size == 1 or not wide:
        return dealt
    if design == "orthogonal":
        return {**dealt, **_orthogonal(size, seed, round_index, wide)}
    for name, spread, ladder in wide if design == "permutations" else [wide[round_index % len(wide)]]:
        dealt[name] = deal(size, seed, round_index, name, spread, ladder)
    return dealt


def _orthogonal(
    size: int, seed: int, round_index: int, explored: Sequence[tuple[str, float, Ladder]]
) -> dict[str, tuple[float, ...]]:
    """Two-level designs: +1 and -1 are the ends of a ladder, drawn anew each round in three ways.

    The row of each replica: over the rounds, each is at each level equally often. The column of each hyperparameter: if
    there are more hyperparameters than columns (one column with 2 and 3 replicas, 3 with 4 and 5, N - 1 if N is a
    multiple of 4, N - 3 with 10, 14, ...), some share one and cannot be told apart in this round, but others do in the
    next. The sign of each column: effects confounded within a round (shared columns, columns of N = 2 (mod 4) replicas,
    whose inner products are at least 2, and products of two effects) get a random sign and average out.

    With an odd number one replica is in the middle of every ladder, and the others form the design.
    """
    even = size - size % 2
    columns = _order([str(k) for k in range(count_columns(even))], seed, round_index, "/column")
    names = _order([name for name, _, _ in explored], seed, round_index, "/hyperparameter")
    rows = slots(size, seed, round_index, "/row")
    dealt = {}
    for name, spread, ladder in explored:
        column = balanced_column(even, int(columns[names.index(name) % len(columns)]))
        sign = 1 if _hash(seed, round_index, "/sign", name)[0] % 2 else -1
        low, middle, high = _ends(size, spread, ladder)
        rungs = [high if level == sign else low for level in column] + [middle] * (size % 2)
        dealt[name] = tuple(rungs[row] for row in rows)
    return dealt


def _ends(size: int, spread: float, ladder: Ladder) -> tuple[float, float, float]:
    """The two ends of a ladder and its middle: the mean is 1 if half of the replicas are at each end.

    The middle, which one replica has if `size` is odd, is that of the ladder's own coordinate: there orthogonal
    columns stay so. It is 1 if the ladder is linear, and at or below 1 if it is logarithmic, as in `multipliers`.
    """
    if ladder == "linear":
        return 1 - spread, 1.0, 1 + spread
    mean = (size // 2 * (spread + 1 / spread) + size % 2) / size
    return 1 / spread / mean, 1 / mean, spread / mean


def _order(items: list[str], seed: int, round_index: int, purpose: str) -> list[str]:
    return sorted(items, key=lambda item: _hash(seed, round_index, purpose, item))


def _hash(seed: int, round_index: int, name: str, item: object) -> bytes:
    return hashlib.blake2b(f"{seed}/{round_index}/{name}/{item}".encode(), digest_size=16).digest()
