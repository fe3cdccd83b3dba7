"""Records as a file: one line of strict JSON per round. docs/records.md documents the schema."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from hdet._replicas import Where
from hdet._user_warning import warn
from hdet.records.reading import Lines, UnreadableError
from hdet.records.record import HyperparameterRecord, RoundRecord, SearchRecord
from hdet.records.schema import Check, Field, MismatchError, count, fields, mapping, number_or_hole, record, text, whole
from hdet.records.sink import writes

VERSION = 1
"""Version of the schema. New keys do not change it: readers ignore keys that they do not know."""

_ROUND = [field.name for field in dataclasses.fields(RoundRecord) if field.name not in ("replica", "hyperparameters")]
_ROW = [field.name for field in dataclasses.fields(HyperparameterRecord)]
_COUNTS = ("round", "step", "steps", "total_steps")
_MOST_REPLICAS, _MOST_ROWS = 100_000, 1000
_BLOCK = 1 << 16
_BY_REPLICA = ("scores", "probe", "values")
_MANY = 16  # replicas; up to that many, numbers are written in full precision
_DIGITS = 12
_ENCODE = json.JSONEncoder(allow_nan=False, check_circular=False).encode


class JSONLines:
    """A sink that appends each record to a file, as one line of strict JSON.

    The first replica writes, the others do nothing. Each line has left the process when the call returns, so a killed
    run loses at most the line being written, which `read_records` skips. Numbers that are not finite are written as
    null. A resumed run continues in the same file. If the disk rejects a line, the sink warns and tries again with the
    next round: an error would leave the other replicas waiting.

    Args:
        path: the file; missing folders are created.
        replicas: as in `hdet.Ensemble`; the first one writes. By default those of the ensemble.

    Example::

        ensemble = hdet.Ensemble(..., on_round=[hdet.JSONLines("runs/first/rounds.jsonl")])
    """

    def __init__(self, path: str | os.PathLike[str], *, replicas: Where | None = None) -> None:
        self.path = Path(path)
        self._replicas = replicas
        self._file: BinaryIO | None = None
        self._written_by = ""
        self._failed = False

    def __call__(self, record: RoundRecord) -> None:
        """Write one record."""
        if not writes(record, self._replicas):
            return
        try:
            self.write(record)
            self._failed = False
        except OSError as error:
            if not self._failed:
                warn(
                    f"round {record.round} cannot be written to {self.path} ({error.strerror or error}); the run goes "
                    "on, and rounds are missing there until it can be"
                )
            self._failed = True

    def write(self, record: RoundRecord) -> None:
        """Write one record, on whichever replica this is.

        Raises:
            OSError: if the disk rejects it. The next write removes any partial line first.
        """
        if self._file is None:
            self._file = _open(self.path)
            self._written_by = f"{socket.gethostname()}:{os.getpid()}"
        left = memoryview(to_line(record, time.time(), self._written_by).encode())
        try:
            while left:  # a nearly full disk writes only a part
                left = left[self._file.write(left) :]
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close the file. A later record opens it again."""
        if self._file is not None:
            self._file.close()
        self._file = None


def to_line(record: RoundRecord, now: float, written_by: str = "") -> str:
    """The line of one record, including the newline."""
    about = {"version": VERSION, "time": round(now, 3), "written_by": written_by}
    rows = (f"{_ENCODE(name)}: {_text(_row(row))}" for name, row in record.hyperparameters.items())
    line = _text(about | {name: getattr(record, name) for name in _ROUND} | {"search": strict(record.search)})
    return f'{line[:-1]}, "hyperparameters": {{{", ".join(rows)}}}}}\n'


def _text(entries: dict[str, Any]) -> str:
    """As strict JSON; the long columns with `_DIGITS` digits, which takes a third of the time."""
    long = {name: entries.pop(name) for name in _BY_REPLICA if len(entries.get(name) or ()) > _MANY}
    columns = "".join(f', "{name}": {_column(values)}' for name, values in long.items())
    try:
        text = _ENCODE(entries)
    except ValueError:  # a number is not finite: rare, so replaced only on failure
        text = _ENCODE(strict(entries))
    return f"{text[:-1]}{columns}}}"


def _column(values: Sequence[float]) -> str:
    if not math.isfinite(sum(values)):
        return _ENCODE(strict(values))
    return f"[{(f'%.{_DIGITS}g, ' * len(values) % tuple(values))[:-2]}]"


def read_records(path: str | os.PathLike[str]) -> list[RoundRecord]:
    """Read the records of a file that `JSONLines` wrote.

    Skips an incomplete last line. If a run was resumed from an earlier step, the repeated rounds replace the original
    ones. null becomes NaN where a number is required. Lines that are not records are skipped with a warning.

    Raises:
        OSError: if the file cannot be opened.
        ValueError: if the file has lines but no record of this version, or is not a file of this kind.
    """
    return [from_json(line) for line in read_lines(path)]


def read_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The checked lines of such a file, without rounds that were repeated later."""
    lines: list[dict[str, Any]] = []
    source = Lines(Path(path), check_line)
    try:
        append(lines, (line for _, line in source.more()))
    except UnreadableError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if source.notice and not lines:
        raise ValueError(f"{path} must hold one JSON object per line, as hdet.JSONLines writes them; {source.notice}")
    if source.notice:
        warn(source.notice)
    return lines


def append(lines: list[dict[str, Any]], fresh: Iterable[dict[str, Any]]) -> bool:
    """Add lines; those of repeated rounds replace the earlier ones. Return whether there were any."""
    again = False
    for line in fresh:
        while lines and lines[-1]["round"] >= line["round"]:
            lines.pop()
            again = True
        lines.append(line)
    return again


def check_line(line: Any) -> dict[str, Any]:
    """Check the known keys of a line: numbers are numbers or None, and lists have one entry per replica.

    Raises:
        ValueError: if it is not a record of this version.
    """
    version = line.get("version", VERSION) if isinstance(line, dict) else VERSION
    if type(version) is int and version > VERSION:
        raise ValueError(f"it has version {version} of the records, this hdet reads up to {VERSION}")
    found: dict[str, Any] = _LINE(line)
    replicas, rows = len(found["scores"]), found["hyperparameters"]
    if replicas > _MOST_REPLICAS or len(rows) > _MOST_ROWS:
        raise ValueError(f"it has {replicas} replicas and {len(rows)} hyperparameters, which no run has")
    if len(found.get("probe") or found["scores"]) != replicas:
        raise MismatchError(f"a list of {replicas}, as scores is", found["probe"]).within("probe")
    for name, row in rows.items():
        if len(row["values"]) != replicas:
            raise MismatchError(f"a list of {replicas}, as scores is", row["values"]).within(f"values of {name[:40]!a}")
    return found


def _schema() -> Check:
    """The check of a line. Fields with a default may be missing: earlier versions of hdet did not write them."""
    row = {**fields(HyperparameterRecord, holes=True), "decision": Field(text, required=False)}
    line = {name: field for name, field in fields(RoundRecord, holes=True).items() if name in _ROUND}
    line |= {name: Field(count, line[name].required) for name in _COUNTS}
    line["search"] = Field(_search_or_none, required=False)
    about = {"version": whole, "time": number_or_hole, "written_by": text}
    line |= {name: Field(check, required=False) for name, check in about.items()}
    return record({**line, "hyperparameters": Field(mapping(record(row)))})


def _search_or_none(value: Any) -> dict[str, Any] | None:
    """A search, or None if it is damaged: it is informative only, so the round is still read."""
    try:
        found: dict[str, Any] = _SEARCH(value)
    except MismatchError:
        return None
    return found


_SEARCH = record(fields(SearchRecord, holes=True))
_LINE = _schema()


def from_json(line: Mapping[str, Any]) -> RoundRecord:
    """The record of one line."""
    known = {name: _tuple(value) for name, value in line.items() if name in _ROUND and value is not None}
    known["search"] = _from_search(line.get("search"))
    rows = {name: _from_row(row) for name, row in line["hyperparameters"].items()}
    return RoundRecord(**{**known, "scores": _numbers(line["scores"]), "hyperparameters": rows})


def strict(value: Any) -> Any:
    """Convert to strict JSON: records become objects, tuples lists, and numbers that are not finite null.

    >>> strict({"a": (float("nan"), 1.0)})
    {'a': [None, 1.0]}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): strict(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _row(row: HyperparameterRecord) -> dict[str, Any]:
    told = {name: getattr(row, name) for name in _ROW}
    return {**told, "memory": dict(row.memory), "decision": row.decision}


def _from_row(row: Mapping[str, Any]) -> HyperparameterRecord:
    known = {name: _tuple(value) for name, value in row.items() if name in _ROW and value is not None}
    for name in ("base", "center", "scale", "proposed_scale"):
        known[name] = math.nan if row[name] is None else float(row[name])
    memory = {key: math.nan if value is None else value for key, value in (row.get("memory") or {}).items()}
    return HyperparameterRecord(**{**known, "values": _numbers(row["values"]), "memory": memory})


def _from_search(told: Mapping[str, Any] | None) -> SearchRecord | None:
    if told is None:
        return None
    return SearchRecord(**{name: _nested(value) for name, value in told.items()})


def _nested(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_nested, value))
    return math.nan if value is None else value


def _numbers(values: list[float | None]) -> tuple[float, ...]:
    return tuple(math.nan if value is None else float(value) for value in values)


def _tuple(value: Any) -> Any:
    return tuple(math.nan if entry is None else entry for entry in value) if isinstance(value, list) else value


def _open(path: Path) -> BinaryIO:
    """Open the file for appending, after removing an incomplete last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file: BinaryIO = open(path, "a+b", buffering=0)  # noqa: SIM115
    end = file.seek(0, os.SEEK_END)
    while end:  # from the end, as the file may be long
        start = max(0, end - _BLOCK)
        file.seek(start)
        last = file.read(end - start).rfind(b"\n")
        if last >= 0 or not start:
            file.truncate(start + last + 1)
            break
        end = start
    return file
