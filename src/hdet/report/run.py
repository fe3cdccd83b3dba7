"""A run as it lies on disk: its records, what the lab adds to them, and whether it still goes on."""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hdet.json_lines import append, parse

_LARGEST = sys.float_info.max
_SECONDS_TO_STALL = 30.0
_ROUNDS_TO_STALL = 10
_SECONDS = ("round_seconds", "converge_seconds", "probe_seconds")
_ROW = ("base", "center", "scale", "scale_before", "proposed_scale", "estimate", "error")


class Status(NamedTuple):
    """Whether a run goes on, in a word and in a sentence."""

    state: Literal["waiting", "running", "stalled", "cut off", "ended"]
    text: str


class Run:
    """One run: a folder with rounds.jsonl, or such a file itself. `refresh()` reads what was added since.

    Attributes:
        path: the file.
        name: what it is called: the folder's name, or the file's.
        lines: the rounds, as `hdet.json_lines` has them.
        generation: goes up when rounds that were read before have changed.
        losses: step, mean training loss and learning rate, from the lab's losses.jsonl.
        result: the lab's result.json; None without it.
        search: the lab's find_lr.json, of the search before the first step; None without it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        given = Path(path)
        self.path = given if given.suffix == ".jsonl" else given / "rounds.jsonl"
        self.name = (given if given.suffix != ".jsonl" else given.with_suffix("")).resolve().name
        self.lines: list[dict[str, Any]] = []
        self.generation = 0
        self.losses: list[tuple[int, float | None, float | None]] = []
        self.result: dict[str, Any] | None = None
        self.search: dict[str, Any] | None = None
        self._read = 0
        self._identity = 0

    def refresh(self) -> bool:
        """Read what is new; whether anything was."""
        before = self._read, self.generation, len(self.losses), self.result
        self._read_folder()
        if self.losses and not self.path.exists():  # a plain run of the lab: nothing but losses
            return before != (self._read, self.generation, len(self.losses), self.result)
        with _open(self.path) as file:
            about = os.fstat(file.fileno())
            if about.st_ino != self._identity or about.st_size < self._read:  # another run in its place
                self.lines, self._read, self._identity = [], 0, about.st_ino
                self.generation += 1
            file.seek(self._read)
            data = file.read()
        fresh: list[dict[str, Any]] = []
        self._read += append(fresh, data, self.path)
        for line in map(_cleaned, fresh):
            if self.lines and self.lines[-1]["round"] >= line["round"]:  # a resumed run does them again
                self.lines = [old for old in self.lines if old["round"] < line["round"]]
                self.generation += 1
            self.lines.append(line)
        return before != (self._read, self.generation, len(self.losses), self.result)

    def status(self, now: float) -> Status:
        """Whether it goes on, from what it has written and whether the process that wrote it is there."""
        if not self.lines and not self.losses:
            return Status("waiting", "no round has ended yet")
        last: dict[str, Any] = self.lines[-1] if self.lines else {"step": self.losses[-1][0]}
        step, total = last["step"], last.get("total_steps")
        where = f"step {step:,}" if total is None else f"step {step:,} of {total:,}"
        if last.get("last") or self.result is not None:
            return Status("ended", f"ended at {where}")
        ago = max(0.0, now - self._written())
        alive = _alive(last.get("written_by", ""))
        if alive is False:
            return Status("cut off", f"cut off at {where}: the process that wrote it is gone and had not finished")
        seconds = [line["round_seconds"] for line in self.lines[-_ROUNDS_TO_STALL:] if line.get("round_seconds")]
        patience = max(_SECONDS_TO_STALL, _ROUNDS_TO_STALL * statistics.median(seconds) if seconds else 0.0)
        if ago <= patience:
            return Status("running", f"running, at {where}")
        doubt = "" if alive else ", or was cut off"
        return Status("stalled", f"stalled{doubt} at {where}: nothing was written for {_duration(ago)}")

    @property
    def exists(self) -> bool:
        """Whether it has begun."""
        return self.path.exists() or (self._in_lab and self.path.with_name("losses.jsonl").exists())

    @property
    def _in_lab(self) -> bool:
        """Whether the folder is one of the lab's, so that its other files mean what they are called."""
        return self.path.name == "rounds.jsonl" and self.path.with_name("options.json").exists()

    @property
    def held_out(self) -> float | None:
        """The held-out loss at the end, where the lab has measured it."""
        return _number(((self.result or {}).get("held_out") or {}).get("loss"))

    def _written(self) -> float:
        """When anything of it was last written."""
        files = [self.path, *([self.path.with_name("losses.jsonl")] if self.losses else [])]
        return max(file.stat().st_mtime for file in files if file.exists())

    def _read_folder(self) -> None:
        if not self._in_lab:
            return
        path = self.path.with_name("losses.jsonl")
        if path.exists():
            lines = parse(path.read_bytes(), path)
            self.losses = [(int(line["step"]), _number(line["loss"]), _number(line.get("lr"))) for line in lines]
        self.result = _read_json(self.path.with_name("result.json"))
        self.search = _read_json(self.path.with_name("find_lr.json"))


def _read_json(path: Path) -> dict[str, Any] | None:
    """What is in a file that may not be there, or be of another program."""
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _cleaned(line: dict[str, Any]) -> dict[str, Any]:
    """A line in which what must be a number is one, or None: another program may have written it."""
    line.update({key: _numbers(line.get(key)) for key in ("scores", "probe")})
    line.update({key: _number(line.get(key)) for key in ("start", *_SECONDS)})
    for row in line["hyperparameters"].values():
        row["values"] = _numbers(row.get("values"))
        row.update({key: _number(row.get(key)) for key in _ROW})
        row["memory"] = {key: _number(value) for key, value in (row.get("memory") or {}).items()}
    return line


def _numbers(values: Any) -> list[float | None]:
    if not isinstance(values, list):
        return []
    return [value if type(value) is float and -_LARGEST < value < _LARGEST else _number(value) for value in values]


def _number(value: Any) -> float | None:
    if type(value) is float:  # nearly always
        return value if -_LARGEST < value < _LARGEST else None
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST
    return float(value) if known else None


def _open(path: Path) -> Any:
    try:
        return open(path, "rb")
    except OSError as error:
        raise FileNotFoundError(
            f"{path} cannot be read ({error.strerror}); give a run folder, or the file that hdet.JSONLines writes"
        ) from error


def _alive(written_by: str) -> bool | None:
    """Whether the process still runs; None if that cannot be told from this machine."""
    host, _, pid = written_by.rpartition(":")
    if host != socket.gethostname() or not pid.isdigit():
        return None
    try:
        os.kill(int(pid), 0)
        stat = Path(f"/proc/{pid}/stat")
        return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] in "ZX")  # ended, not yet buried
    except ProcessLookupError:
        return False
    except (PermissionError, OSError):
        return True


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
