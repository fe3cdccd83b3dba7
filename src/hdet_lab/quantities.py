"""Reads and formats quantities with units: 400Gb/s, 350ms, 7B parameters, 1%."""

from __future__ import annotations

import math
import re

from hdet_lab.errors import OptionError

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}
_COUNTS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_RATES = {
    f"{prefix}{unit}/s": factor / (8 if unit in ("b", "bit") else 1)
    for unit in ("b", "bit", "B")
    for prefix, factor in ({**_PREFIXES, **_BINARY}).items()
}
_NUMBER = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/%]*)\s*")


def count(name: str, text: str) -> float:
    """A number of things.

    >>> count("params", "7e9"), count("params", "350M"), count("params", "1.5B")
    (7000000000.0, 350000000.0, 1500000000.0)
    """
    return _read(name, text, _COUNTS, "7e9, 350M or 7B")


def seconds(name: str, text: str) -> float:
    """A time in seconds.

    >>> seconds("step_time", "1.2"), seconds("step_time", "500ms"), seconds("step_time", "2min")
    (1.2, 0.5, 120.0)
    """
    return _read(name, text, _SECONDS, "1.2, 350ms or 20us")


def rate(name: str, text: str) -> float:
    """A bandwidth in bytes per second. The unit is required: a bit is an eighth of a byte.

    >>> rate("bandwidth", "400Gb/s"), rate("bandwidth", "50GB/s"), rate("bandwidth", "1GiB/s")
    (50000000000.0, 50000000000.0, 1073741824.0)
    """
    return _read(name, text, _RATES, "400Gb/s (bits) or 50GB/s (bytes)")


def part(name: str, text: str) -> float:
    """A part of the whole.

    >>> part("overhead", "1%"), part("overhead", "0.01")
    (0.01, 0.01)
    """
    found = _read(name, text, {"": 1.0, "%": 0.01}, "1% or 0.01")
    if found >= 1:
        raise OptionError(f"{name} must be less than 100%, got {text!r}; for example 1% or 0.01")
    return found


def _read(name: str, text: str, units: dict[str, float], examples: str) -> float:
    match = _NUMBER.fullmatch(text)
    unit = match[2] if match else ""
    try:
        value = float(match[1]) * units[unit] if match else math.nan
    except (KeyError, ValueError):
        known = unit in units
        problem = (
            f"{unit!r} is no unit of it" if unit and not known else "a unit is missing" if not known else "no number"
        )
        raise OptionError(f"{name} must be like {examples}, got {text!r}: {problem}") from None
    if not (0 < value < math.inf):
        raise OptionError(f"{name} must be positive, and like {examples}, got {text!r}")
    return value


def show_bytes(value: float) -> str:
    """Bytes in decimal units.

    >>> show_bytes(28e9), show_bytes(0), show_bytes(140e3)
    ('28 GB', '0 B', '140 kB')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} B"


def show_seconds(value: float) -> str:
    """A time.

    >>> show_seconds(1.234), show_seconds(0.0123), show_seconds(3e-6)
    ('1.23 s', '12.3 ms', '3 us')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"


def show_part(value: float) -> str:
    """A part in percent.

    >>> show_part(0.0123)
    '1.23 %'
    """
    return f"{100 * value:.3g} %"
