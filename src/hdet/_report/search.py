"""The search before the first step, as shown on a page: from the first record, or from the lab's find_lr.json."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

_MOST_POINTS = 2000  # of a ramp
_HIGHEST = 1.5  # times the loss at the initial weights: higher losses add no information
_TRAINED_AS = {"size": "size", "steps": "total_steps", "seed": "seed", "replicas": "replicas", "optimizer": "optimizer"}
_NUMBERS = ("rate", "factor", "first_loss", "steps", "cost", "seconds")


def find_search(lines: Sequence[Mapping[str, Any]], file: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The checked data of a search for a page; None if there was no valid one.

    Args:
        lines: the rounds, of which the first one may have it.
        file: the lab's find_lr.json, if there is one.
    """
    told = file if file is not None else lines[0].get("search") if lines else None
    if not isinstance(told, Mapping) or _positive(told.get("rate")) is None:
        return None
    found: dict[str, Any] = {name: _positive(told.get(name)) for name in _NUMBERS}
    found["start"] = _positive(told.get("start")) or _positive(told.get("peak_lr"))
    found["low"], found["high"] = _pair(told.get("interval"))
    found["lower"] = _pair(told.get("whole"))[0]
    for ramp in ("coarse", "fine"):
        found[ramp] = _curve(told.get(ramp), _HIGHEST * (found["first_loss"] or math.inf))
    doubts = told.get("doubts")
    found["doubts"] = [str(doubt) for doubt in doubts] if isinstance(doubts, list) else []
    found["next"] = _next(told, found["rate"])
    return found


def answer(search: Mapping[str, Any]) -> str:
    """The result and its cost, in a sentence or two."""
    rate, start, cost = (number(search[key]) for key in ("rate", "start", "cost"))
    times = "" if not search["start"] else f", {number(search['rate'] / search['start'])} times your rate, {start}"
    took = "cost" if search["seconds"] is None else f"took {seconds(search['seconds'])},"
    said = f"{rate}{times}. The search {took} as much as {cost} steps."
    return said if not search["doubts"] else f"{said}\nNot sure: {'; '.join(search['doubts'])}."


def where(search: Mapping[str, Any]) -> str:
    """The range of low losses, and how the answer follows from it."""
    low, high, lower, factor = (search[key] for key in ("low", "high", "lower", "factor"))
    if low is None or high is None:
        return ""
    said = f"Losses were low from {number(low)} to {number(high)}"
    if lower is not None and lower < low:
        said += f"; that is narrow, as the ramp was too fast to see all of it, so it counts from {number(lower)} on"
    if factor is not None:
        said += f". The answer is {number(factor)} x the geometric middle of that"
        if not low <= search["rate"] <= high:
            side = "below" if search["rate"] < low else "above"
            said += f", and so lies {side} what was seen to be low"
    return f"{said}."


def number(x: float | None) -> str:
    """With three digits."""
    return "?" if x is None else f"{x:,.0f}" if 1000 <= abs(x) < 1e6 else f"{x:.3g}"


def seconds(x: float) -> str:
    """A length of time."""
    if x < 120:
        return f"{x:.1f} s"
    return f"{x / 60:.0f} min" if x < 7200 else f"{x / 3600:.1f} h"


def _next(told: Mapping[str, Any], rate: float) -> str:
    """The next commands after a search that no run has followed yet."""
    by_hand = f"OneCycleLR(optimizer, max_lr={rate:.3g}, ...)"
    scale = _positive(told.get("scale"))
    times = "" if scale is None else f", or {scale:.3g} times the rates that there were"
    said = f"In a script of your own: {by_hand}{times}."
    return "\n".join([*(f"hdet {words}" for words in commands_after(told)), said])


def commands_after(told: Mapping[str, Any]) -> list[str]:
    """The arguments of `hdet` that train with the rate in find_lr.json, or first compare it if it is doubtful."""
    if not isinstance(told.get("task"), str):
        return []
    options = [f"--{flag} {shlex.quote(str(told[name]))}" for flag, name in _TRAINED_AS.items() if name in told]
    words = f"{shlex.quote(told['task'])} {' '.join(options)} --peak-lr {told['rate']:.3g}"
    plain = " --controller none" if told.get("replicas") == 1 else ""
    return [*([f"sweep {words} --seeds 1"] if told.get("doubts") else []), f"train {words}{plain}"]


def _positive(x: Any) -> float | None:
    known = isinstance(x, (int, float)) and not isinstance(x, bool)
    return float(x) if known and 0 < x < 1e300 else None


def _pair(x: Any) -> tuple[float | None, float | None]:
    if not isinstance(x, (list, tuple)) or len(x) != 2:
        return None, None
    low, high = map(_positive, x)
    return (low, high) if low is not None and high is not None and low <= high else (None, None)


def _curve(x: Any, highest: float) -> list[list[float | None]]:
    """Two columns: rising rates, and losses; those that are not finite become the highest value drawn."""
    points = x if isinstance(x, (list, tuple)) else []
    rates: dict[float, float | None] = {}
    for point in points[:_MOST_POINTS]:
        if isinstance(point, (list, tuple)) and len(point) == 2 and (rate := _positive(point[0])) is not None:
            loss = _positive(point[1])
            rates[rate] = min(highest if loss is None else loss, highest) if highest < math.inf else loss
    ordered = sorted(rates.items())
    return [[rate for rate, _ in ordered], [loss for _, loss in ordered]]
