"""Checks of arguments. Every message names the argument, the rule, the value, and what to write instead."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Rule(NamedTuple):
    """A rule for a number: the test, the test in words ("be positive"), and a value that passes it."""

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


def check_flag(name: str, value: object) -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}; write {name}=True")


def check_names(call: str, given: Collection[str], known: Collection[str], instead: Mapping[str, str]) -> None:
    """Raise if a name in `given` is unknown to `call`; the message says what to write instead."""
    for name in given:
        if name not in known and name in instead:
            raise TypeError(f"{call} has no argument {name!r}; write {instead[name]}")
        if name not in known:
            raise TypeError(f"{name!r} is no argument of {call}, which takes {', '.join(known)}")


def answers(call: str, instead: Mapping[str, str]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function answer unknown arguments with what to write instead.

    Args:
        call: the function's name, as the user knows it.
        instead: what to write, by name; names that the function has are ignored.
    """

    def wrap(function: Callable[P, T]) -> Callable[P, T]:
        known = inspect.signature(function).parameters
        wrong = {name: write for name, write in instead.items() if name not in known}

        @functools.wraps(function)
        def within(*args: P.args, **kwargs: P.kwargs) -> T:
            check_names(call, [name for name in kwargs if name in wrong], (), wrong)
            return function(*args, **kwargs)

        return within

    return wrap
