"""Records as columns of numbers for the charts, small enough for a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hdet.controllers.line_search import fit, fit_with_intercept

MOST_REPLICAS = 16
"""More than that are shown by quantiles."""

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
_NOT_FINITE = frozenset({"nan", "inf", "-inf"})
_MOST_POINTS = 250_000  # of all rounds' line searches together, with many replicas


def columns(lines: Sequence[Mapping[str, Any]], since: int = 0) -> dict[str, Any]:
    """The rounds from `since` on, by column. Numbers have six digits, or are null if not finite."""
    part = lines[since:]
    names = list(lines[-1]["hyperparameters"]) if lines else []
    found: dict[str, Any] = {key: [line[key] for line in part] for key in ("round", "step")}
    found["full"] = [bool(line["full"]) for line in part]
    for key in ("start", "round_seconds", "converge_seconds", "probe_seconds"):
        found[key] = _short([line.get(key) for line in part])
    for key in ("scores", "probe"):
        found[key] = _each([line.get(key) or [] for line in part], _replicas(lines))
    found["best"] = [_best(line) for line in part]
    found["mean"] = _short([_mean(line["scores"]) for line in part])
    found["own"] = _short([line.get("loss") for line in part])
    several = len(names) > 1
    found["hyperparameters"] = {
        name: _hyperparameter([line["hyperparameters"].get(name) for line in part], part, lines, several)
        for name in names
    }
    return found


def points(lines: Sequence[Mapping[str, Any]], since: int = 0) -> dict[str, Any]:
    """With many replicas: each one's values and scores, by the index of the round, for as many rounds as fit."""
    replicas = _replicas(lines)
    if replicas <= MOST_REPLICAS:
        return {}
    every = math.ceil(len(lines) * replicas / _MOST_POINTS)
    kept = [index for index in range(since, len(lines)) if index % every == 0 or index == len(lines) - 1]
    return {str(index): _points(lines[index]) for index in kept}


def events(lines: Sequence[Mapping[str, Any]], since: int = 0) -> list[list[Any]]:
    """Index of the round, step and text of every event."""
    found = enumerate(lines[since:], start=since)
    return [[index, line["step"], str(text)] for index, line in found for text in line.get("events") or ()]


def _hyperparameter(
    rows: Sequence[Mapping[str, Any] | None], part: Sequence[Any], lines: Sequence[Any], several: bool
) -> dict[str, Any]:
    told: list[Mapping[str, Any]] = [row or {} for row in rows]
    found: dict[str, Any] = {
        key: _short([row.get(key) for row in told])
        for key in ("base", "center", "scale", "scale_before", "estimate", "error")
    }
    found["values"] = _each([row.get("values") or [] for row in told], _replicas(lines))
    found["decision"] = [str(row.get("decision") or "") for row in told]
    found["finding"] = [str(row.get("finding") or "") for row in told]
    memory = [row.get("memory") or {} for row in told]
    found["target"] = _short([kept.get("target") for kept in memory])
    found["vertex"] = _short([_vertex(kept) for kept in memory])
    found["fit"] = [_fit(row, line, several) for row, line in zip(told, part, strict=True)]
    return found


def _fit(row: Mapping[str, Any], line: Mapping[str, Any], several: bool) -> list[float | None] | None:
    """c, a and b of this round's parabola through the rises over its start; None if there is none."""
    center, values, start, probe = row.get("center"), row.get("values"), line.get("start"), line.get("probe")
    if not center or not values or start is None or not probe or min(values, key=_key) == max(values, key=_key):
        return None
    rhos = [math.nan if value is None else value / center for value in values]
    rises = [math.nan if loss is None else loss - start for loss in probe]
    try:
        found = (fit_with_intercept if several else fit)(rhos, rises)
    except (ArithmeticError, ValueError):  # numbers whose squares or sums no float holds
        found = None
    if found is None:
        return None
    a, b = found
    kept = [(rho, rise) for rho, rise in zip(rhos, rises, strict=True) if math.isfinite(rise)]
    c = sum(rise - a * rho - b * rho * rho for rho, rise in kept) / len(kept) if several else 0.0
    return _short([c, a, b])


def _vertex(memory: Mapping[str, Any]) -> float | None:
    """The lowest point as the controller estimates it from all its rounds; None on a hill."""
    slope, curvature = memory.get("slope"), memory.get("curvature")
    return -slope / (2 * curvature) if slope is not None and curvature and slope < 0 < curvature else None


def _points(line: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: _short(row["values"]) for name, row in line["hyperparameters"].items()}
    return {"values": values, "losses": _short(line.get("probe") or line["scores"])}


def _each(rows: Sequence[Sequence[float | None]], replicas: int) -> list[list[float | None]]:
    """One column for each replica, or for each quantile if there are many."""
    if replicas > MOST_REPLICAS:
        told = [_quantiles(row) for row in rows]
        return [[row[k] for row in told] for k in range(len(QUANTILES))]
    return [_short([row[k] if k < len(row) else None for row in rows]) for k in range(replicas)]


def _quantiles(row: Sequence[float | None]) -> list[float | None]:
    known = sorted(x for x in row if x is not None)
    if not known:
        return [None] * len(QUANTILES)
    return _short([known[round(q * (len(known) - 1))] for q in QUANTILES])


def _best(line: Mapping[str, Any]) -> int | None:
    losses = line.get("probe") or line["scores"]
    known = [(loss, replica) for replica, loss in enumerate(losses) if loss is not None]
    return min(known)[1] if known else None


def _mean(scores: Sequence[float | None]) -> float | None:
    known = [score for score in scores if score is not None]
    return sum(known) / len(known) if known else None


def _replicas(lines: Sequence[Mapping[str, Any]]) -> int:
    """The highest number of replicas: it may have changed on a resume."""
    return max((len(line["scores"]) for line in lines), default=0)


def _short(numbers: Sequence[float | None]) -> list[float | None]:
    """Round all numbers to six digits; None for those that are not finite."""
    known = tuple([math.nan if x is None else x for x in numbers])
    texts = ("%.6g " * len(known) % known).split()
    if math.isfinite(sum(known)):
        return list(map(float, texts))
    return [None if text in _NOT_FINITE else float(text) for text in texts]


def _key(x: float | None) -> float:
    return math.inf if x is None else x
