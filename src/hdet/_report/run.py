"""A run on disk: its records, the lab's additions, and whether it is still running."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import statistics
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hdet._find_lr.found_rate import FoundRate
from hdet._replicas.liveness import process_state
from hdet.records.json_lines import append, check_line
from hdet.records.reading import Lines, UnreadableError, read_json, why
from hdet.records.schema import Check, Field, count, fields, mapping, number_or_hole, of, record, text

_SECONDS_TO_STALL = 30.0
_ROUNDS_TO_STALL = 10
_SECONDS = ("round_seconds", "converge_seconds", "probe_seconds")
_MOST_SECONDS = 1e12
_WRITER = re.compile(r"(.*):([1-9][0-9]{0,8})", re.DOTALL)
_LOSS = record(
    {"step": Field(count), "loss": Field(number_or_hole), "lr": Field(number_or_hole, required=False)}, others=True
)
_RESULT = record({"held_out": Field(mapping(number_or_hole), required=False)}, others=True)
_ABOUT = record({"options": Field(of(dict[str, Any]), required=False)}, others=True)
_FOUND = {name: field._replace(required=False) for name, field in fields(FoundRate, holes=True).items()}
_SEARCH = record({**_FOUND, "peak_lr": Field(number_or_hole, required=False)}, others=True)


class Status(NamedTuple):
    """Whether a run goes on, in a word and in a sentence."""

    state: Literal["waiting", "running", "stalled", "cut off", "ended"]
    text: str


class Run:
    """One run: a folder with rounds.jsonl, or such a file itself. `refresh()` reads what was added since.

    Attributes:
        path: the file.
        name: what it is called: the folder's name, or the file's.
        lines: the rounds, as `hdet.records.json_lines` has them.
        generation: goes up when rounds that were read before have changed.
        losses: step, mean training loss and learning rate, from the lab's losses.jsonl.

    What is no round, or not what it must be, is left out: `notices` say so.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        given = Path(path)
        self.path = given if given.suffix == ".jsonl" else given / "rounds.jsonl"
        self.name = text((given if given.suffix != ".jsonl" else given.with_suffix("")).resolve().name)
        self.lines: list[dict[str, Any]] = []
        self.generation = 0
        self.losses: list[tuple[int, float | None, float | None]] = []
        self._rounds = Lines(self.path, check_line)
        self._loss_lines = Lines(self.path.with_name("losses.jsonl"), _LOSS)
        self._result = _Document(self.path.with_name("result.json"), _RESULT)
        self._about = _Document(self.path.with_name("options.json"), _ABOUT)
        self._search = _Document(self.path.with_name("find_lr.json"), _SEARCH)
        self._trouble: dict[Path, str] = {}  # why a file of lines cannot be read

    @property
    def result(self) -> dict[str, Any] | None:
        """The lab's result.json; None without it."""
        return self._result.content

    @property
    def search(self) -> dict[str, Any] | None:
        """The search before the first step: find_lr.json, of the lab or of `FoundRate.save`; None without it."""
        return self._search.content

    @property
    def notices(self) -> list[str]:
        """What was left out and why, in words."""
        files = (self._rounds, self._loss_lines, self._result, self._search)
        return [said for said in (*self._trouble.values(), *(file.notice for file in files)) if said]

    def refresh(self) -> bool:
        """Read new content; return whether there was any.

        Raises:
            FileNotFoundError: if there is nothing to read.
        """
        before = self._state()
        self._trouble.clear()
        if self._in_lab:
            self._read_losses()
            self._result.refresh()
            self._about.refresh()
        if self._in_folder:
            self._search.refresh()
        if _is_there(self.path) or not (self.losses or self.search):  # a plain run, or a search, has no rounds
            self._read_rounds()
        return before != self._state()

    def follow(self) -> None:
        """Like `refresh()`, for a run that may not have started or may be gone; read errors go to `notices`."""
        self._trouble.clear()
        try:
            if self.exists:
                self.refresh()
        except OSError as error:
            self._trouble[self.path] = str(error)

    def _state(self) -> tuple[Any, ...]:
        return self._rounds.position, self.generation, len(self.losses), self.result

    def _read_rounds(self) -> None:
        restarts, fresh = self._rounds.restarts, []
        try:
            fresh = [_cleaned(line) for _, line in self._rounds.more()]
        except (OSError, UnreadableError) as error:
            said = f"{self.path} cannot be read ({why(error)})"
            if not self.losses:
                said = "; ".join([said, *filter(None, (self._result.notice, self._search.notice))])
                raise FileNotFoundError(f"{said}; give a run folder, or the file that hdet.JSONLines writes") from error
            self._trouble[self.path] = said
        if self._rounds.restarts != restarts:  # another run in its place
            self.lines = []
            self.generation += 1
        self.generation += append(self.lines, fresh)

    def _read_losses(self) -> None:
        path, restarts = self._loss_lines.path, self._loss_lines.restarts
        try:
            fresh = [(line["step"], line["loss"], line.get("lr")) for _, line in self._loss_lines.more()]
        except FileNotFoundError:
            return
        except (OSError, UnreadableError) as error:
            self._trouble[path] = f"{path} cannot be read ({why(error)})"
            return
        self.losses = [*(self.losses if self._loss_lines.restarts == restarts else []), *fresh]

    def status(self, now: float) -> Status:
        """Whether the run is still running, judged by its files and by the process that writes them."""
        if not self.lines and not self.losses:
            return self._begun()
        last: dict[str, Any] = self.lines[-1] if self.lines else {"step": self.losses[-1][0]}
        step, total = last["step"], last.get("total_steps")
        where = f"step {step:,}" if total is None else f"step {step:,} of {total:,}"
        if last.get("last") or self.result is not None:
            return Status("ended", f"ended at {where}")
        written = self._written()
        if written is None:
            return Status("cut off", f"cut off at {where}: its files are gone; what they held is shown")
        ago = max(0.0, now - written)
        alive = _alive(last.get("written_by") or "")
        if alive is False:
            return Status("cut off", f"cut off at {where}: the process that wrote it is gone and had not finished")
        seconds = [line["round_seconds"] for line in self.lines[-_ROUNDS_TO_STALL:] if line.get("round_seconds")]
        patience = max(_SECONDS_TO_STALL, _ROUNDS_TO_STALL * statistics.median(seconds) if seconds else 0.0)
        if ago <= patience:
            return Status("running", f"running, at {where}")
        doubt = "" if alive else ", or was cut off"
        return Status("stalled", f"stalled{doubt} at {where}: nothing was written for {_duration(ago)}")

    def _begun(self) -> Status:
        """What there is before the first round."""
        if self.search is None:
            return Status("waiting", "no round has ended yet")
        about = self._about.content or {}
        if (about.get("options") or {}).get("controller") == "none":  # a plain run does not search
            return Status("ended", "a search for the learning rate, and no run")
        return Status("waiting", "the search has ended, no round yet")

    @property
    def exists(self) -> bool:
        """Whether it has begun."""
        others = [self._loss_lines.path] if self._in_lab else []
        others += [self._search.path] if self._in_folder else []
        return any(map(_is_there, (self.path, *others)))

    @property
    def _in_folder(self) -> bool:
        """Whether it is a folder, in which the file of a search is of this run, and not a file with another name."""
        return self.path.name == "rounds.jsonl"

    @property
    def _in_lab(self) -> bool:
        """Whether the folder is one of the lab's, so that its other files can be trusted by name."""
        return self._in_folder and _is_there(self._about.path)

    @property
    def held_out(self) -> float | None:
        """The held-out loss at the end, if the lab measured it."""
        loss: float | None = ((self.result or {}).get("held_out") or {}).get("loss")
        return loss

    def _written(self) -> float | None:
        """The time of the last write to any of its files; None if they are gone."""
        times = []
        for file in (self.path, *([self._loss_lines.path] if self.losses else [])):
            with contextlib.suppress(OSError):
                times.append(file.stat().st_mtime)
        return max(times, default=None)


class _Document:
    """A JSON file beside the rounds, read again when it changes; its content is None if missing or invalid."""

    def __init__(self, path: Path, check: Check) -> None:
        self.content: dict[str, Any] | None = None
        self.notice = ""
        self.path, self._check = path, check
        self._stamp: tuple[int, ...] = ()

    def refresh(self) -> None:
        try:
            about = self.path.stat()
            stamp = about.st_ino, about.st_mtime_ns, about.st_size
            if stamp != self._stamp:
                self.content, self.notice, self._stamp = None, "", stamp
                self.content = self._check(read_json(self.path))
        except FileNotFoundError:
            self.content, self.notice, self._stamp = None, "", ()
        except (OSError, ValueError) as error:
            self.content, self.notice = None, f"{self.path} is left out: {why(error)}"


def _is_there(path: Path) -> bool:
    """Whether the name exists, readable or not."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _cleaned(line: dict[str, Any]) -> dict[str, Any]:
    """The line without absurdly large times, because times are summed."""
    for key in _SECONDS:
        seconds = line.get(key)
        line[key] = seconds if seconds is not None and 0 <= seconds < _MOST_SECONDS else None
    return line


def _alive(written_by: str) -> bool | None:
    """Whether the process still runs; None if that cannot be told from this machine."""
    match = _WRITER.fullmatch(written_by)
    if match is None or match[1] != socket.gethostname():
        return None
    state = process_state(int(match[2]))
    return None if state is None else state != "ended"


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
