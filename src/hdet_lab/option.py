"""One option: a dataclass field with its default, its help and the rules for its value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple

from hdet_lab.errors import OptionError

Group = Literal["task", "run", "fan-out", "softmax"]
REQUIRED: Any = dataclasses.MISSING
"""The default of an option that must be given."""


class Rule(NamedTuple):
    """A condition on a value; None is always allowed.

    Attributes:
        holds: whether a value meets it.
        words: the condition in words that follow "must be".
        example: a value to write instead.
    """

    holds: Callable[[Any], bool]
    words: str
    example: str = ""

    def check(self, name: str, value: object) -> None:
        """Raise OptionError unless the option `name` may have this value.

        >>> positive("1e-3").check("peak_lr", 0.0)
        Traceback (most recent call last):
        ...
        hdet_lab.errors.OptionError: peak_lr must be positive, got 0.0; for example 1e-3
        """
        if value is not None and not self.holds(value):
            example = f"; for example {self.example}" if self.example else ""
            raise OptionError(f"{name} must be {self.words}, got {value!r}{example}")


class Option(NamedTuple):
    """The description of an option, besides its name, type and default.

    Attributes:
        help: one line for `--help`.
        rules: conditions on its value.
        metavar: placeholder for the value in the help.
        group: "task" if every command that trains can set it; "fan-out" or "softmax" if it has no effect without
            fan-out, or with another controller.
    """

    help: str
    rules: tuple[Rule, ...]
    metavar: str | None
    group: Group


def option(
    default: Any,
    help: str,
    *rules: Rule,
    metavar: str | None = None,
    group: Group = "run",
) -> Any:
    """A field of a dataclass that is an `Option`."""
    about = Option(help, rules, metavar, group)
    return dataclasses.field(default=default, metadata={"option": about})


def options_of(kind: Any) -> dict[str, Option]:
    """The options of a dataclass, by name."""
    return {field.name: field.metadata["option"] for field in dataclasses.fields(kind)}


def one_of(choices: Collection[str]) -> Rule:
    """One of these words."""
    return Rule(lambda value: value in choices, f"one of {', '.join(choices)}")


def whole(least: int, *, or_word: str | None = None) -> Rule:
    """A whole number of at least `least`, or that word."""

    def holds(value: Any) -> bool:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return value == or_word if isinstance(value, str) else is_whole and value >= least

    return Rule(holds, f"a whole number of at least {least}")


def positive(example: str) -> Rule:
    """A finite number above 0."""
    return Rule(lambda value: 0 < value < math.inf, "positive", example)


def at_least_0(example: str) -> Rule:
    """A finite number that is not negative."""
    return Rule(lambda value: 0 <= value < math.inf, "at least 0", example)


def spread(example: str) -> Rule:
    """A spread: of the linear ladder if below 1, of the log ladder if above."""
    return Rule(lambda value: 0 <= value < 1 or 1 < value < math.inf, "in [0, 1), or above 1", example)
