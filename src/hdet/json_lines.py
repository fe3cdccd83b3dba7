"""Records as a file: one line of strict JSON per round. docs/records.md is its schema."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch.distributed as dist

from hdet.record import HyperparameterRecord, RoundRecord
from hdet.sink import writes

VERSION = 1
"""Of the schema. A new key is no new version: readers leave out what they do not know."""

_REQUIRED = {"round": int, "step": int, "scores": list, "hyperparameters": dict}
_KINDS = {"events": list, "written_by": str}
_IN_ROW = ("base", "center", "scale", "proposed_scale")
_NUMBER = (int, float, type(None))
_ROUND = [field.name for field in dataclasses.fields(RoundRecord) if field.name not in ("replica", "hyperparameters")]
_ROW = [field.name for field in dataclasses.fields(HyperparameterRecord)]
_BLOCK = 1 << 16
_BY_REPLICA = ("scores", "probe", "values")
_MANY = 16  # replicas; the numbers of fewer are written to the last digit
_DIGITS = 12
_ENCODE = json.JSONEncoder(allow_nan=False, check_circular=False).encode


class JSONLines:
    """A sink that appends each record to a file, as one line of strict JSON.

    The first replica writes, the others do nothing. A line has left the process when the call returns, so a run that is
    killed loses at most the line under way, which `read_records` leaves out. A number that is not finite is written as
    null. A run that is resumed goes on in the same file. A disk that does not take a line does not end the run, which
    the other replicas would wait in: there is a warning, and the next round is tried again.

    Args:
        path: the file; folders are made.
        process_group: the replicas, of which the first writes; by default those of the ensemble.

    Example::

        ensemble = hdet.Ensemble(..., on_round=[hdet.JSONLines("runs/first/rounds.jsonl")])
    """

    def __init__(self, path: str | os.PathLike[str], *, process_group: dist.ProcessGroup | None = None) -> None:
        self.path = Path(path)
        self._process_group = process_group
        self._file: BinaryIO | None = None
        self._written_by = ""
        self._failed = False

    def __call__(self, record: RoundRecord) -> None:
        """Write one record."""
        if not writes(record, self._process_group):
            return
        try:
            self.write(record)
            self._failed = False
        except OSError as error:
            if not self._failed:
                warnings.warn(
                    f"round {record.round} cannot be written to {self.path} ({error.strerror or error}); the run goes "
                    "on, and rounds are missing there until it can be",
                    stacklevel=2,
                )
            self._failed = True

    def write(self, record: RoundRecord) -> None:
        """Write one record, on whichever replica this is.

        Raises:
            OSError: if the disk does not take it. A part of it is cut off before the next one.
        """
        if self._file is None:
            self._file = _open(self.path)
            self._written_by = f"{socket.gethostname()}:{os.getpid()}"
        left = memoryview(to_line(record, time.time(), self._written_by).encode())
        try:
            while left:  # a disk that is nearly full takes a part
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
    """The line of one record, with its end."""
    about = {"version": VERSION, "time": round(now, 3), "written_by": written_by}
    rows = (f"{_ENCODE(name)}: {_text(_row(row))}" for name, row in record.hyperparameters.items())
    line = _text(about | {name: getattr(record, name) for name in _ROUND})
    return f'{line[:-1]}, "hyperparameters": {{{", ".join(rows)}}}}}\n'


def _text(entries: dict[str, Any]) -> str:
    """As strict JSON; the long columns with `_DIGITS` digits, which takes a third of the time."""
    long = {name: entries.pop(name) for name in _BY_REPLICA if len(entries.get(name) or ()) > _MANY}
    columns = "".join(f', "{name}": {_column(values)}' for name, values in long.items())
    try:
        text = _ENCODE(entries)
    except ValueError:  # a number that is not finite: rare, so looked for only when it happens
        text = _ENCODE(strict(entries))
    return f"{text[:-1]}{columns}}}"


def _column(values: Sequence[float]) -> str:
    if not math.isfinite(sum(values)):
        return _ENCODE(strict(values))
    return f"[{(f'%.{_DIGITS}g, ' * len(values) % tuple(values))[:-2]}]"


def read_records(path: str | os.PathLike[str]) -> list[RoundRecord]:
    """The records of a file that `JSONLines` wrote.

    A last line that was cut short is left out. Where a run was resumed from an earlier step, the rounds that it has
    done again replace those of before. null is NaN where there must be a number.

    Raises:
        ValueError: for a file of a later version, or one that is not of this kind.
    """
    return [from_json(line) for line in read_lines(path)]


def read_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of such a file as they are, checked, without what was done again."""
    lines: list[dict[str, Any]] = []
    append(lines, Path(path).read_bytes(), Path(path))
    return lines


def append(lines: list[dict[str, Any]], data: bytes, path: Path) -> int:
    """Add the whole lines of `data` to `lines`, which are replaced where rounds were done again.

    Returns:
        How many bytes were read: up to the end of the last whole line.
    """
    for line in parse(data, path):
        _check(line, path)
        while lines and lines[-1]["round"] >= line["round"]:
            lines.pop()
        lines.append(line)
    return data.rfind(b"\n") + 1


def parse(data: bytes, path: Path) -> Iterator[Any]:
    """What the whole lines of a file hold; the last one is left out if a kill has cut it short.

    Raises:
        ValueError: for a line that is no JSON.
    """
    for text in data[: data.rfind(b"\n") + 1].splitlines():
        try:
            yield json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path} must hold one JSON object per line, got {text[:80]!r}") from error


def from_json(line: Mapping[str, Any]) -> RoundRecord:
    """The record of one line."""
    known = {name: _tuple(value) for name, value in line.items() if name in _ROUND}
    rows = {name: _from_row(row) for name, row in line["hyperparameters"].items()}
    return RoundRecord(**{**known, "scores": _numbers(line["scores"]), "hyperparameters": rows})


def strict(value: Any) -> Any:
    """As strict JSON has it: records as objects, tuples as lists, and null for a number that is not finite.

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
    known = {name: _tuple(value) for name, value in row.items() if name in _ROW}
    for name in ("base", "center", "scale", "proposed_scale"):
        known[name] = math.nan if row[name] is None else float(row[name])
    memory = {key: math.nan if value is None else value for key, value in row.get("memory", {}).items()}
    return HyperparameterRecord(**{**known, "values": _numbers(row["values"]), "memory": memory})


def _numbers(values: list[float | None]) -> tuple[float, ...]:
    return tuple(math.nan if value is None else float(value) for value in values)


def _tuple(value: Any) -> Any:
    return tuple(math.nan if entry is None else entry for entry in value) if isinstance(value, list) else value


def _check(line: Any, path: Path) -> None:
    """Raise unless it is a record."""
    if not isinstance(line, dict) or not all(isinstance(line.get(key), kind) for key, kind in _REQUIRED.items()):
        raise ValueError(f"{path} must hold records as hdet.JSONLines writes them, got {_beginning(line)}")
    version = line.get("version", VERSION)
    if not isinstance(version, int) or version > VERSION:
        raise ValueError(f"{path} has version {version} of the records, this hdet reads up to {VERSION}")
    if not _is_whole(line):
        raise ValueError(f"{path} holds a damaged record of round {line['round']}: {_beginning(line)}")


def _beginning(line: Any) -> str:
    return json.dumps(line)[:80]


def _is_whole(line: Mapping[str, Any]) -> bool:
    """Whether what is in it is of the right kind, as far as readers count on it."""
    kinds = all(isinstance(line.get(key, kind()), kind) for key, kind in _KINDS.items())
    return (
        kinds
        and isinstance(line.get("full"), bool)
        and all(
            isinstance(row, dict)
            and isinstance(row.get("values"), list)
            and isinstance(row.get("memory", {}), dict)
            and all(isinstance(row.get(key, ""), _NUMBER) for key in _IN_ROW)
            for row in line["hyperparameters"].values()
        )
    )


def _open(path: Path) -> BinaryIO:
    """The file, to be appended to; what a kill has left of a line is cut off first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file: BinaryIO = open(path, "a+b", buffering=0)  # noqa: SIM115
    end = file.seek(0, os.SEEK_END)
    while end:  # from the back, for a file may be long
        start = max(0, end - _BLOCK)
        file.seek(start)
        last = file.read(end - start).rfind(b"\n")
        if last >= 0 or not start:
            file.truncate(start + last + 1)
            break
        end = start
    return file
