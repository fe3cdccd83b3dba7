"""Columns of +1 and -1 that sum to 0 and are orthogonal, or as nearly so as their length allows.

Columns are computed one at a time, from integers alone: no matrix is kept, and every machine gets the same ones.
`assignment.py` deals them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache


def count_columns(length: int) -> int:
    """How many different columns there are of `length`, an even number.

    All length - 1 of a Hadamard matrix where one is known here: powers of 2, Paley's two families, and their doubles.
    Other multiples of 4 (92, 116, ...) are put together from two shorter matrices, and have about half as many.
    With length = 2 (mod 4) no two balanced columns are orthogonal and 2 is the least inner product: a Hadamard matrix
    with one more + and one more - has it, in length - 3 columns.
    """
    if length == 6:
        return len(_halves_of_six())
    blocks = _blocks(length)
    return min(order - 1 for order in blocks if order > 2 or len(blocks) == 1)


def balanced_column(length: int, number: int) -> list[int]:
    """Column `number`, from 0, of those that `count_columns` counts.

    >>> [balanced_column(4, number) for number in range(3)]
    [[1, -1, -1, 1], [1, 1, -1, -1], [1, -1, 1, -1]]
    """
    if length == 6:
        return _halves_of_six()[number]
    return [sign for order in _blocks(length) for sign in _normalised(order, 1 + number % (order - 1))]


@lru_cache(maxsize=1)
def _halves_of_six() -> list[list[int]]:
    """The ten ways to halve six replicas. Any two of them have an inner product of 2 or -2."""
    return [[1 if k in (0, *pair) else -1 for k in range(6)] for pair in itertools.combinations(range(1, 6), 2)]


@lru_cache(maxsize=64)
def _blocks(length: int) -> tuple[int, ...]:
    """Orders of Hadamard matrices that add up to `length`: columns put end to end stay balanced and orthogonal."""
    if _is_order(length):
        return (length,)
    if length % 4 == 2:
        return (*_blocks(length - 2), 2)
    half = length // 8 * 4
    shorter = next(order for order in range(half, 0, -4) if _is_order(order) and _is_order(length - order))
    return (length - shorter, shorter)


@lru_cache(maxsize=1024)
def _is_order(order: int) -> bool:
    """Whether `_raw` can make a Hadamard matrix of this order."""
    if order < 4 or order % 4:
        return order in (1, 2)
    return _root(order - 1, 3) > 0 or _root(order // 2 - 1, 1) > 0 or _is_order(order // 2)


def _normalised(order: int, column: int) -> list[int]:
    """One column of the matrix, its rows negated so that column 0 is all ones; then the others are balanced."""
    return [a * b for a, b in zip(_raw(order, 0), _raw(order, column), strict=True)]


def _raw(order: int, column: int) -> Sequence[int]:
    """One column of the Hadamard matrix of an order that `_is_order` knows."""
    if order == 1:
        return (1,)
    if order > 2 and _root(order - 1, 3):
        return _paley_1(order - 1, column)
    if order > 2 and order % 4 == 0 and _root(order // 2 - 1, 1):
        return _paley_2(order // 2 - 1, column)
    half = _raw(order // 2, column // 2)  # Sylvester: the Kronecker product with [[1, 1], [1, -1]]
    return [sign * other for sign in half for other in (1, -1 if column % 2 else 1)]


def _paley_1(q: int, column: int) -> list[int]:
    """Order q + 1, for q = 3 (mod 4): I + [[0, 1], [-1, chi(i - j)]]."""
    if column == 0:
        return [1] + [-1] * q
    return [1] + [chi or 1 for chi in _characters(q, column - 1)]


def _paley_2(q: int, column: int) -> list[int]:
    """Order 2 (q + 1), for q = 1 (mod 4): C x [[1, 1], [1, -1]] + I x [[1, -1], [-1, -1]], C = [[0, 1], [1, chi]]."""
    place, second = divmod(column, 2)
    conference = [0] + [1] * q if place == 0 else [1, *_characters(q, place - 1)]
    beside, on_diagonal = ((1, -1), (-1, -1)) if second else ((1, 1), (1, -1))
    return [sign for c in conference for sign in ((c * beside[0], c * beside[1]) if c else on_diagonal)]


def _characters(q: int, column: int) -> list[int]:
    """chi(i - column) for every i of the field with q elements."""
    table, p = _character(q), _prime(q)
    if p == q:
        return [table[i - column] for i in range(q)]  # a negative index counts from the end: mod q
    return [table[_difference(i, column, p)] for i in range(q)]


def _difference(a: int, b: int, p: int) -> int:
    """a - b in a field of p^k elements, which are numbered by their digits to base p."""
    result, place = 0, 1
    while a or b:
        result += (a - b) % p * place
        a, b, place = a // p, b // p, place * p
    return result


@lru_cache(maxsize=64)
def _character(q: int) -> list[int]:
    """The quadratic character chi of the field with q elements: 0 for 0, 1 for squares, -1 for all others.

    Squares are the even powers of a primitive element. That is x modulo the first monic polynomial, of degree k where
    q = p^k, for which the powers of x reach every element but 0.
    """
    p = _prime(q)
    degree = next(k for k in itertools.count(1) if p**k == q)
    one = (1,) + (0,) * (degree - 1)
    for polynomial in itertools.product(range(p), repeat=degree):
        chi, power, element = [0] * q, 0, one
        while power == 0 or (element != one and power < q - 1):
            chi[sum(digit * p**k for k, digit in enumerate(element))] = -1 if power % 2 else 1
            # times x: the digits move up, and x^degree is minus the rest of the polynomial
            element = tuple((low - element[-1] * c) % p for low, c in zip((0, *element[:-1]), polynomial, strict=True))
            power += 1
        if element == one and power == q - 1:
            return chi
    raise AssertionError(f"no primitive polynomial for {q}")


@lru_cache(maxsize=2048)
def _prime(q: int) -> int:
    """The smallest prime factor of `q`."""
    return next((p for p in range(2, int(q**0.5) + 1) if q % p == 0), q)


@lru_cache(maxsize=2048)
def _root(q: int, remainder: int) -> int:
    """The prime that `q` is a power of; 0 if it is none, or not `remainder` modulo 4."""
    if q < 3 or q % 4 != remainder:
        return 0
    rest, p = q, _prime(q)
    while rest % p == 0:
        rest //= p
    return p if rest == 1 else 0
