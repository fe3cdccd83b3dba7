"""Checks of JSON values, made from type annotations; errors say in words what is wrong and where.

    check = record(fields(Start))
    check({"peak_lr": "fast", "steps": 5})    # MismatchError: peak_lr must be a number, got text

The annotation of a new dataclass field is its check. Unknown keys are dropped or kept, as requested; a field with a
default may be missing or null.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, Union, get_args, get_origin, get_type_hints

Check: TypeAlias = Callable[[Any], Any]
"""Returns a JSON value if it is valid; raises `MismatchError` if not."""

_LARGEST = 2**53  # larger integers are not counts, and a browser cannot represent them
_SHOWN = 40
_NAMES = {bool: "true or false", str: "text", dict: "an object", list: "a list", tuple: "a list", type(None): "null"}


class Field(NamedTuple):
    """One key of an object: the check of its value, and whether it is required."""

    check: Check
    required: bool = True


class MismatchError(ValueError):
    """A value that fails its check."""

    def __init__(self, rule: str, value: object) -> None:
        super().__init__(rule, value)
        self.rule = rule
        self._got = _told(value)
        self._where = ""

    def within(self, where: str) -> MismatchError:
        """The same error for a value at `where` in a larger one."""
        self._where = where + (f".{self._where}" if self._where and self._where[0] != "[" else self._where)
        return self

    def __str__(self) -> str:
        return f"{self._where or 'it'} must be {self.rule}, got {self._got}"


def fields(kind: Any, *, holes: bool = False) -> dict[str, Field]:
    """The fields of a dataclass, by name.

    Args:
        kind: the dataclass.
        holes: a number may also be null or not finite, which becomes None.
    """
    hints = get_type_hints(kind)
    missing = dataclasses.MISSING
    return {
        field.name: Field(of(hints[field.name], holes), field.default is missing and field.default_factory is missing)
        for field in dataclasses.fields(kind)
    }


def record(known: Mapping[str, Field], *, others: bool = False) -> Check:
    """An object with these keys.

    Args:
        known: its fields.
        others: keep all other keys, unchecked.
    """
    needed = [name for name, field in known.items() if field.required]

    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise MismatchError("an object", value)
        found: dict[str, Any] = {}
        for name, entry in value.items():
            field = known.get(name)
            if field is None:
                if others:
                    found[name] = entry
            else:
                left = entry is None and not field.required
                found[name] = None if left else _at(name, field.check, entry)
        for name in needed:
            if name not in found:
                raise MismatchError(f"an object with {name!r}", value)
        return found

    return check


def of(kind: Any, holes: bool = False) -> Check:
    """A value of this type, as annotations write it: bool, int, float, str, lists, mappings, unions and literals."""
    simple: dict[Any, Check] = {Any: _anything, bool: _truth, int: whole, float: number, str: text}
    if holes:
        simple[float] = number_or_hole
    if kind in simple:
        return simple[kind]
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        checks = [of(each, holes) for each in inner if each is not type(None)]
        return functools.partial(_any_of, checks, type(None) in inner)
    if origin is Literal:
        return functools.partial(_one_of, inner)
    if origin in (list, tuple, Sequence):
        checks = [of(each, holes) for each in inner if each is not Ellipsis]
        is_fixed = origin is tuple and Ellipsis not in inner
        return functools.partial(_fixed, checks) if is_fixed else functools.partial(_list, checks[0])
    if origin in (dict, Mapping):
        return mapping(of(inner[1], holes))
    if dataclasses.is_dataclass(kind):
        return record(fields(kind, holes=holes))
    raise TypeError(f"there is no check for {kind}")


def mapping(check: Check) -> Check:
    """An object with any keys whose values pass `check`."""
    return functools.partial(_mapping, check)


def number(value: Any) -> float:
    """A finite number."""
    found = number_or_hole(value)
    if found is None:
        raise MismatchError("a number" if value is None else "a finite number", value)
    return found


def number_or_hole(value: Any) -> float | None:
    """A number; None for null and for numbers that are not finite."""
    if type(value) is float:  # nearly always
        return value if math.isfinite(value) else None
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise MismatchError("a number", value)
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def whole(value: Any) -> int:
    """A whole number, including one that another program wrote as 3.0."""
    known = isinstance(value, numbers.Integral) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not known or abs(int(value)) > _LARGEST:
        raise MismatchError("a whole number", value)
    return int(value)


def count(value: Any) -> int:
    """A whole number of at least 0."""
    found = whole(value)
    if found < 0:
        raise MismatchError("at least 0", value)
    return found


def text(value: Any) -> str:
    """Text that can be encoded: JSON also allows lone surrogates."""
    if not isinstance(value, str):
        raise MismatchError("text", value)
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def _anything(value: Any) -> Any:
    return value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise MismatchError("true or false", value)
    return value


def _any_of(checks: Sequence[Check], null: bool, value: Any) -> Any:
    if value is None and null:
        return None
    rules = []
    for check in checks:
        try:
            return check(value)
        except MismatchError as error:
            if len(checks) == 1:
                raise
            rules.append(error.rule)
    raise MismatchError(" or ".join(rules), value)


def _one_of(choices: Sequence[Any], value: Any) -> Any:
    if not isinstance(value, (str, int)) or value not in choices:
        raise MismatchError(" or ".join(repr(choice) for choice in choices), value)
    return value


def _list(check: Check, value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise MismatchError("a list", value)
    if check in (number, number_or_hole) and set(map(type, value)) <= {float} and math.isfinite(sum(value)):
        return value if isinstance(value, list) else list(value)  # nearly always
    found: list[Any] = []
    try:
        for entry in value:
            found.append(check(entry))
    except MismatchError as error:
        raise error.within(f"[{len(found)}]") from None
    return found


def _fixed(checks: Sequence[Check], value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)) or len(value) != len(checks):
        raise MismatchError(f"a list of {len(checks)}", value)
    return [_at(f"[{k}]", check, entry) for k, (check, entry) in enumerate(zip(checks, value, strict=True))]


def _mapping(check: Check, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise MismatchError("an object", value)
    return {text(name): _at(name, check, entry) for name, entry in value.items()}


def _at(name: str, check: Check, value: Any) -> Any:
    try:
        return check(value)
    except MismatchError as error:
        plain = name[:1] == "[" or (name.isidentifier() and len(name) <= _SHOWN)
        raise error.within(name if plain else ascii(name[:_SHOWN])) from None


def _told(value: object) -> str:
    """A value in a few words."""
    if isinstance(value, (bool, type(None))):
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, str):
        return ascii(value[:_SHOWN])
    if isinstance(value, int) and abs(value) > _LARGEST:
        return "a larger one"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    return _NAMES.get(type(value), f"a {type(value).__name__}")
