"""What an argument must be. Every message names the argument, the rule, the value got, and what to write instead."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import NamedTuple


class Rule(NamedTuple):
    """What a number must fulfil: the test, the test in words ("be positive"), and a value that passes it."""

    holds: Callable[[float], bool]
    words: str
    example: str


def check_number(name: str, value: object, rule: Rule) -> None:
    """Raise unless `value` is a real number that fulfils the rule."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number and {rule.words}, got {value!r}; write for example {rule.example}")
    if not rule.holds(float(value)):
        raise ValueError(f"{name} must {rule.words}, got {value}; write for example {rule.example}")


def check_count(name: str, value: object, least: int = 1, unit: str = "optimizer steps") -> None:
    """Raise unless `value` is an int of at least `least`."""
    example = max(least, 1) * 100
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, a number of {unit}, got {value!r}; write for example {example}")
    if value < least:
        raise ValueError(f"{name} must be at least {least} {unit}, got {value}; write for example {example}")
