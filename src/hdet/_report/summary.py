"""A run in a few sentences: what was found before it, what was tried, who won, what the controller did, what it cost,
whether all is well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hdet._report.run import Status
from hdet._report.search import answer, find_search, where
from hdet._report.search import number as _number
from hdet._report.search import seconds as _seconds
from hdet.records.trend import Trend, words

_HIGHEST = ("center", "base")
_MOST_NAMES = 4  # hyperparameters listed one by one
_FOUND = "found: "  # prefix of the event about a search before the first step
_ALARMS = re.compile(r"rolled back|quarantin|diverge|not finite", re.IGNORECASE)
_CLOSE = 0.1  # of the rounds: nearer to a half than that is no preference


def summary(
    lines: Sequence[Mapping[str, Any]], status: Status, search: Mapping[str, Any] | None = None
) -> list[dict[str, str]]:
    """Titles and texts of a few lines, the last one with a `tone`: good, or bad if someone should look.

    Args:
        lines: the rounds.
        status: whether the run goes on.
        search: the lab's find_lr.json, if the rate was found before the run.
    """
    searched = find_search(lines, search)
    if not lines and searched is not None:
        return [_search_card(_found(None, searched), searched), *_only_searched(searched, status)]
    if not lines:
        tone = "good" if status.state in ("waiting", "running", "ended") else "bad"
        return [{"title": "Health", "text": f"{status.text}; no rounds are recorded.", "tone": tone}]
    names = _told(lines[-1]["hyperparameters"])
    trend = _trend(lines[-1])
    problem = words(trend)
    doubted = bool(problem) or trend.shows_nothing
    found = _found(lines[0], searched)
    return [
        *([_search_card(found, searched)] if found else []),
        {"title": "Tried", "text": _tried(lines, names)},
        {"title": "Won", "text": _doubted(_won(lines, names), doubted)},
        {"title": "Controller", "text": _doubted(_controller(lines, names, doubted), doubted)},
        {"title": "Cost", "text": _cost(lines, searched)},
        _health(lines, status, problem),
    ]


def _trend(line: Mapping[str, Any]) -> Trend:
    """The trend of the losses since the start, from a record."""
    return Trend(**{name: line[name] for name in Trend._fields if line.get(name) is not None})


def _doubted(text: str, doubted: bool) -> str:
    return (
        f"{text}\nThe losses have not clearly fallen since the start: this shows nothing of what is better."
        if doubted
        else text
    )


def _told(hyperparameters: Mapping[str, Any]) -> list[str]:
    return list(hyperparameters)[:_MOST_NAMES]


def _found(first: Mapping[str, Any] | None, search: Mapping[str, Any] | None) -> str:
    """The result and cost of a search before the first step; empty if there was none."""
    if search is not None:
        return answer(search)
    events = [str(event) for event in (first or {}).get("events") or ()]  # all that older files have of it
    return next((event.removeprefix(_FOUND) + "." for event in events if event.startswith(_FOUND)), "")


def _search_card(text: str, search: Mapping[str, Any] | None) -> dict[str, str]:
    return {"title": "Found", "text": text} | ({"tone": "bad"} if search is not None and search["doubts"] else {})


def _only_searched(search: Mapping[str, Any], status: Status) -> list[dict[str, str]]:
    """The summary of a search that no run has followed yet."""
    about = [{"title": "Where", "text": where(search)}] if where(search) else []
    said = f"{status.text[:1].upper()}{status.text[1:]}."
    return [*about, {"title": "Next", "text": search["next"]}, {"title": "Health", "text": said, "tone": "good"}]


def _tried(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    replicas = len(lines[-1]["scores"])
    said = [f"{_count(replicas, 'replica')}, {_count(len(lines), 'round')} of {_interval(lines)}."]
    for name in names:
        row = next((r for line in reversed(lines) if (r := _explored(line, name)) is not None), None)
        if row is None:
            said.append(f"{name}: not explored.")
            continue
        low, high = min(row["values"]), max(row["values"])
        if row["center"] and row["center"] > 0 and low > 0:
            said.append(f"{name}: {low / row['center']:.2f} to {high / row['center']:.2f} times its center.")
        else:
            said.append(f"{name}: {low:.3g} to {high:.3g}.")
    return "\n".join(said)


def _won(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    said = []
    for name in names:
        higher = rounds = 0
        for line in lines:
            row, losses = _explored(line, name), line.get("probe") or line["scores"]
            known = [(loss, replica) for replica, loss in enumerate(losses) if loss is not None]
            if row is None or not known or len(row["values"]) != len(losses):
                continue
            rounds += 1
            higher += row["values"][min(known)[1]] > (row["center"] or 0.0)
        if not rounds:
            continue
        share = higher / rounds
        if abs(share - 0.5) <= _CLOSE:
            said.append(f"{name}: neither side, the higher values in {share:.0%} of {_count(rounds, 'round')}.")
        else:
            side = "higher" if share > 0.5 else "lower"
            said.append(f"{name}: the {side} values, in {max(share, 1 - share):.0%} of {_count(rounds, 'round')}.")
    return "\n".join(said) or "No replica was compared with another."


def _controller(lines: Sequence[Mapping[str, Any]], names: Sequence[str], doubted: bool) -> str:
    said = []
    for name in names:
        rows, at = _while_it_mattered(lines, name)
        moved = [row for row in rows if row.get("decision") not in ("kept", "", None)]
        if not moved:
            why = f" ({_why(rows[-1])})" if _why(rows[-1]) and not doubted else ""
            said.append(f"{name}: on the schedule, x{_number(rows[-1]['scale'])}{why}.")
            continue
        now = f"{name}: {at} x{_number(rows[-1]['scale'])} of the schedule, moved in {_count(len(moved), 'round')}."
        why = f" ({_why(moved[-1])})" if _why(moved[-1]) and not doubted else ""
        center, base = (max((row[key] for row in rows if row[key] is not None), default=None) for key in _HIGHEST)
        highest = f"At most {_number(center)}, where the schedule has {_number(base)}."
        said.append(f"{now} {highest} Last: {moved[-1]['decision']}{why}.")
    return "\n".join(said)


def _while_it_mattered(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[list[Mapping[str, Any]], str]:
    """The rows up to the last one with a base of half its peak or more, and when that was.

    While a schedule approaches zero no scale changes the loss much, so the controller's scales say little.
    """
    found = [(line["step"], line["hyperparameters"][name]) for line in lines if name in line["hyperparameters"]]
    half = max((row["base"] for _, row in found if row["base"] is not None), default=0.0) / 2
    last = max((k for k, (_, row) in enumerate(found) if (row["base"] or 0.0) >= half), default=len(found) - 1)
    rows = [row for _, row in found[: last + 1]]
    ends = last == len(found) - 1
    return rows, "now" if ends else f"until step {found[last][0]}, where the schedule falls below half its peak,"


def _why(row: Mapping[str, Any]) -> str:
    return str(row.get("finding") or "").partition(": ")[2]


def _cost(lines: Sequence[Mapping[str, Any]], search: Mapping[str, Any] | None = None) -> str:
    total, converge, probe = (
        math.fsum(line.get(f"{part}_seconds") or 0.0 for line in lines) for part in ("round", "converge", "probe")
    )
    if total <= 0:
        return "No times were recorded."
    before = (search or {}).get("seconds") or 0.0
    total += before
    searched = f"search {before / total:.1%}, " if before else ""
    return (
        f"{(before + converge + probe) / total:.1%} of {_seconds(total)}: {searched}converge {converge / total:.1%}, "
        f"probe {probe / total:.1%}. The rest is training."
    )


def _health(lines: Sequence[Mapping[str, Any]], status: Status, problem: str) -> dict[str, str]:
    losses = [line.get("probe") or line["scores"] for line in lines]
    judged = [row for row in losses if any(loss is not None for loss in row)]
    holes = sum(any(loss is None for loss in row) for row in judged)
    alarms = sum(bool(_ALARMS.search(str(text))) for line in lines for text in line.get("events") or ())
    # Rounds without a single loss are those in which nothing was gathered, or in which all replicas were lost.
    lost = sum(
        all(loss is None for loss in row) and _is_explored(line) for row, line in zip(losses, lines, strict=True)
    )
    wrong = []
    if holes + lost:
        wrong.append(f"{_count(holes + lost, 'round')} with losses that are not finite")
    if alarms:
        wrong.append(f"{_count(alarms, 'alarm')} in the events below")
    if problem:
        wrong.append(problem)
    good = status.state in ("running", "ended", "waiting") and not wrong
    said = f"{status.text[:1].upper()}{status.text[1:]}."
    said += (
        f" {(faults := '; '.join(wrong))[:1].upper()}{faults[1:]}."
        if wrong
        else " All losses are finite, no rollback."
        if judged
        else ""
    )
    means = [sum(known) / len(known) for row in judged if (known := [x for x in row if x is not None])]
    if means:
        at = [line["step"] for row, line in zip(losses, lines, strict=True) if any(x is not None for x in row)][-1]
        last = "the last" if at == lines[-1]["step"] else f"that of step {at}, the last with losses"
        said += f" Loss {means[0]:.4g} in the first round, {means[-1]:.4g} in {last}."
    own = [] if means else [line["loss"] for line in lines if line.get("loss") is not None]
    if own:
        said += f" Loss of the first replica {own[0]:.4g} at the start, {own[-1]:.4g} at the end."
    return {"title": "Health", "text": said, "tone": "good" if good else "bad"}


def _explored(line: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    row: Mapping[str, Any] | None = line["hyperparameters"].get(name)
    values = [] if row is None else row["values"]
    return row if values and None not in values and min(values) != max(values) else None


def _is_explored(line: Mapping[str, Any]) -> bool:
    return any(_explored(line, name) is not None for name in line["hyperparameters"])


def _interval(lines: Sequence[Mapping[str, Any]]) -> str:
    steps = sorted({line.get("steps") or 0 for line in lines if line["full"]} or {lines[-1].get("steps") or 0})
    return _count(steps[0], "step") if len(steps) == 1 else f"{steps[0]} to {steps[-1]} steps"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
