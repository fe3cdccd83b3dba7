"""Checks of a learned schedule: the content of the file that `hdet export` writes and `ReplayLR` reads."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

from hdet.records.schema import Field, MismatchError, count, mapping, number, of, record, text

VERSION = 1
KIND = "hdet-schedule"
IN_GROUPS = re.compile(r"(?P<optimizer>[0-9]{1,9})/(?P<group>[0-9]{1,9})/(?P<entry>[^/]+(/[0-9]{1,9})?)")
"""A place in an optimizer's parameter groups; values that the forward pass reads have other names."""

_BOUNDS = dict.fromkeys(("lr", "weight_decay", "eps"), (0.0, math.inf)) | dict.fromkeys(
    ("momentum", "betas"), (0.0, 1.0)
)
_ROW = {"places": list[str], "steps": list[int], "centers": list[list[float]]}
_VERSION = record({"version": Field(count)})
_CONTENT = record(
    {
        "kind": Field(text),
        "version": Field(count),
        "total_steps": Field(count),
        "complete": Field(of(bool), required=False),
        "outer_step": Field(number, required=False),
        "outer_momentum": Field(number, required=False),
        "gradients": Field(text, required=False),
        "tail_average_taken": Field(of(bool), required=False),
        "hyperparameters": Field(mapping(record({name: Field(of(kind, True)) for name, kind in _ROW.items()}))),
    }
)


def check_schedule(schedule: Any) -> dict[str, Any]:
    """Check a schedule's content and return it.

    Raises:
        TypeError: if it, or a value in it, has the wrong type.
        ValueError: if it is inconsistent.
    """
    if not isinstance(schedule, Mapping) or schedule.get("kind") != KIND:
        raise ValueError(f'schedule must be what `hdet export` writes, got {str(schedule)[:80]!r}; write for example '
                         '"schedule.json"')  # fmt: skip
    try:
        told: dict[str, Any] = _VERSION(schedule)
        if told["version"] > VERSION:
            raise ValueError(f"schedule has version {told['version']}, this hdet reads up to {VERSION}; upgrade hdet")
        told = _CONTENT(schedule)
    except MismatchError as error:
        raise TypeError(f"schedule must be as `hdet export` writes it: {error}") from None
    if told["total_steps"] < 1 or not told["hyperparameters"]:
        raise ValueError(
            f"schedule must have steps and hyperparameters, got {told['total_steps']} steps and "
            f"{len(told['hyperparameters'])} hyperparameters; export a run that has trained"
        )
    for name in ("outer_step", "outer_momentum"):
        if (told.get(name) or 0.0) < 0:
            raise ValueError(f"schedule must have an {name} of at least 0, got {told[name]:g}; export the run again")
    for name, row in told["hyperparameters"].items():
        _check_row(name, row, told["total_steps"], told.setdefault("complete", True))
    return told


def reaches_the_end(hyperparameters: Mapping[str, Any], total_steps: int) -> bool:
    """Whether the centers of all hyperparameters are known up to the last step."""
    return all(told["steps"][-1] == total_steps - 1 for told in hyperparameters.values())


def notices(told: Mapping[str, Any]) -> list[str]:
    """The ways in which plain training with the schedule differs from the run that learned it."""
    found = []
    first = max(row["steps"][0] for row in told["hyperparameters"].values())
    if first > 0:
        found.append(
            f"the schedule begins at step {first}, whose values are held before it: rounds of the run are missing"
        )
    taken, momentum = told.get("outer_step") or 1.0, told.get("outer_momentum") or 0.0
    if momentum:
        same = f"hdet.Nesterov({taken:g}, {momentum:g})"
        found.append(
            f"the schedule was learned with an outer optimizer, {same}, which takes other steps than plain training; "
            f"replay it with the same one: hdet.Ensemble(..., averaging=hdet.Averaging(outer_step={same}))"
        )
    elif taken < 1:
        found.append(
            f"the schedule was learned with an outer step of {taken:g}, which tolerates rates that are too "
            "high for plain training; replay it with the same one: "
            f"hdet.Ensemble(..., averaging=hdet.Averaging(outer_step={taken:g}))"
        )
    if told.get("gradients") == "local":
        found.append(
            "the schedule was learned with local gradients, where each replica steps on its own part of the batch; "
            'replay it with the same: hdet.Ensemble(..., gradients="local")'
        )
    if told.get("tail_average_taken"):
        found.append(
            "the run ended with its tail average, halfway to the mean of the weights of its last rounds, which a "
            "schedule cannot replay; to get the same, average them as well: hdet.Averaging(tail=0.5)"
        )
    return found


def _check_row(name: str, row: Mapping[str, Any], total: int, complete: bool) -> None:
    """Raise unless the centers of one hyperparameter are a schedule."""
    places, steps, centers = row["places"], row["steps"], row["centers"]
    if not places or len(set(places)) < len(places):
        raise ValueError(f"schedule must have places of {name}, each once, got {places}; export the run again")
    if not steps or len(centers) != len(steps) or any(len(each) != len(places) for each in centers):
        raise ValueError(
            f"schedule must have a center of {name} for each of its steps and places, got {len(steps)} steps, "
            f"{len(places)} places and {len(centers)} rows of centers; export the run again"
        )
    if any(later <= earlier for earlier, later in itertools.pairwise(steps)) or steps[0] < 0 or steps[-1] >= total:
        raise ValueError(
            f"schedule must have steps of {name} that rise from 0 to at most {total - 1}, its total_steps less 1; got "
            f"{steps[0]} to {steps[-1]}; export the run again"
        )
    if complete and steps[-1] != total - 1:
        raise ValueError(
            f"schedule must reach step {total - 1}, the last one, as it is said to be complete, but {name} ends at "
            f'step {steps[-1]}; export the run again, or write "complete": false to hold its last value from there'
        )
    for place, column in zip(places, zip(*centers, strict=True), strict=True):
        entry = place.split("/")[2] if IN_GROUPS.fullmatch(place) else ""
        low, high = _BOUNDS.get(entry, (-math.inf, math.inf))
        for step, center in zip(steps, column, strict=True):
            if center is None:
                raise ValueError(f"schedule holds centers of {name} that are not finite, the first at step {step}; "
                                 "export a run that did not diverge")  # fmt: skip
            if not low <= center <= high:
                rule = "at least 0" if high == math.inf else f"from {low:g} to {high:g}"
                raise ValueError(f"schedule must have centers of {name} {rule}, got {center} at step {step}; "
                                 "export the run again, or mend the file")  # fmt: skip
