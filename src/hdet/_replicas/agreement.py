"""Agreement before the first step: a call that fails or differs on one replica fails with the same error on all.

Every replica first runs its own part of the call. Then all exchange, through the store and not by a collective, their
error or a hash of their arguments, and the arguments themselves only if the hashes differ.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from hdet._replicas import Replicas, Where, find_replicas
from hdet._replicas.claims import same
from hdet._replicas.fingerprint import SECTIONS, Claims
from hdet._replicas.store import MissingError, same_calls, who

P = ParamSpec("P")
T = TypeVar("T")
_KINDS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}
_MOST_NAMED = 3
_open = threading.local()


class Agreement:
    """A block of code that succeeds on all replicas or on none, and only if their arguments are equal.

    Nested blocks belong to it: replicas meet once, at its end. `claim` within it adds values that must be equal.

    Args:
        call: the call, as the user knows it.
        where: the replicas, a process group or a device mesh; all ranks for anything else.
    """

    def __init__(self, call: str, where: object = None) -> None:
        self._call, self._where = call, where if isinstance(where, Where) else None
        self.claims: Claims = {}
        self.undo: list[Callable[[], object]] = []

    def __enter__(self) -> None:
        self._outer: Agreement | None = getattr(_open, "agreement", None)
        if self._outer is None:
            _open.agreement = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._outer is not None:
            return
        _open.agreement = None
        if error is not None and not isinstance(error, Exception):
            return
        replicas = find_replicas(self._where)
        if replicas.ranks.size > 1:
            try:
                settle(replicas, self._call, self.claims, error)
            except Exception:
                for undo in self.undo:
                    undo()
                raise


def claim(claims: Claims, undo: Callable[[], object] | None = None) -> None:
    """Within an `Agreement`, add values that must be equal on all replicas, and what to undo if they are not."""
    agreement: Agreement = _open.agreement
    for section, items in claims.items():
        agreement.claims.setdefault(section, {}).update(items)
    if undo is not None:
        agreement.undo.append(undo)


def agreed(call: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function an `Agreement` of the replicas in its argument `replicas`, or in that of its `ensemble`."""

    def wrap(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def within(*args: P.args, **kwargs: P.kwargs) -> T:
            made = kwargs.get("ensemble")
            given = {**made, **kwargs} if isinstance(made, Mapping) else kwargs
            with Agreement(call, given.get("replicas")):
                return function(*args, **kwargs)

        return within

    return wrap


def settle(replicas: Replicas, call: str, claims: Claims, error: Exception | None = None) -> None:
    """Compare errors and claims with the other replicas.

    Raises:
        TypeError, ValueError, RuntimeError: the same on every replica; `error` itself if all have met the same.
    """
    found = None if error is None else [type(error).__name__, str(error)]
    mine = json.dumps({"call": call, "error": found, "hash": _hash(claims)})
    replicas.arrive(call)
    try:
        verdict = _ask(replicas, mine, _compare_calls)
        if verdict.get("show"):
            verdict = _ask(replicas, json.dumps(claims), _compare_claims)
    except MissingError as missing:
        seen = replicas.last_seen(missing.ranks)
        replicas.part(replicas.ranks.size - len(missing.ranks))
        raise RuntimeError(
            f"{who(missing.ranks, replicas.noun)} did not come to {call} within {missing.seconds:.3g} s: dead, "
            "stalled, or failed before it; look at the logs there"
            + (f" (last seen: {seen})" if seen else "")
            + ". Every replica must make this call"
        ) from error
    if verdict:
        replicas.part()
    if verdict.get("same"):
        assert error is not None
        return  # and what was raised here goes on
    if verdict:
        raise _KINDS.get(verdict["kind"], RuntimeError)(verdict["text"]) from error


def _ask(replicas: Replicas, mine: str, decide: Callable[[list[Any], str], dict[str, Any]]) -> dict[str, Any]:
    def decide_all(shown: list[str]) -> str:
        return json.dumps(decide([json.loads(text) for text in shown], replicas.noun))

    verdict: dict[str, Any] = json.loads(replicas.settle(mine, decide_all))
    return verdict


def _compare_calls(shown: list[dict[str, Any]], noun: str) -> dict[str, Any]:
    """The first replica's decision from all calls, errors and hashes."""
    calls = [entry["call"] for entry in shown]
    if len(set(calls)) > 1:
        odd, usual = _odd(calls)
        text = f"{who(odd, noun)} came to {calls[odd[0]]} while the others came to {usual}; {same_calls(noun)}"
        return {"kind": "RuntimeError", "text": text}
    errors = [entry["error"] for entry in shown]
    if any(errors):
        if all(error == errors[0] for error in errors):
            return {"same": True}
        failed = [rank for rank, error in enumerate(errors) if error]
        name, text = errors[failed[0]]
        alike = [rank for rank in failed if errors[rank] == errors[failed[0]]]
        more = f" ({who(failed, noun)} failed in all)" if len(alike) < len(failed) else ""
        kind = "" if name in _KINDS or name == "RuntimeError" else f"{name}: "
        where = f"{who(alike, noun)} of {len(shown)}"
        return {"kind": name, "text": f"{kind}{text} [raised by {calls[0]} on {where}{more}]"}
    return {"show": True} if len({entry["hash"] for entry in shown}) > 1 else {}


def _compare_claims(shown: list[Claims], noun: str) -> dict[str, Any]:
    """The first replica's decision from all claims: the items that differ, and the odd replicas."""
    found = []
    for section, remedy in SECTIONS.items():
        items = dict.fromkeys(item for claims in shown for item in claims.get(section, {}))
        for item in items:
            values = [claims.get(section, {}).get(item, "nothing") for claims in shown]
            if any(not alike(value, values[0]) for value in values):
                found.append((item, values, remedy))
    if not found:
        return {}  # the last digits of another machine's arithmetic
    item, values, remedy = found[0]
    texts = [value if isinstance(value, str) else repr(value) for value in values]
    odd, usual = _odd(texts)
    seen = {text: [rank for rank in odd if texts[rank] == text] for text in dict.fromkeys(texts[rank] for rank in odd)}
    said = ", ".join(f"{text} on {who(ranks, noun)}" for text, ranks in list(seen.items())[:_MOST_NAMED])
    rest = [name for name, _, _ in found[1:]]
    more = f"; also on {', '.join(rest[:_MOST_NAMED])}" + (" and more" if len(rest) > _MOST_NAMED else "")
    text = f"the replicas disagree on {item}: {said}, but {usual} on the others{more if rest else ''}; {remedy}"
    return {"kind": "ValueError", "text": text}


def _odd(values: list[str]) -> tuple[list[int], str]:
    """The replicas that differ from the most common value, and that value; on a tie, the first replica's value."""
    usual = Counter(values).most_common(1)[0][0]
    return [rank for rank, value in enumerate(values) if value != usual], usual


def alike(a: object, b: object) -> bool:
    """Whether two claims are the same, up to the last digits of another machine's arithmetic."""
    if isinstance(a, float) and isinstance(b, float):
        return same(a, b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == b


def _hash(claims: Claims) -> str:
    return hashlib.sha256(json.dumps(claims).encode()).hexdigest()
