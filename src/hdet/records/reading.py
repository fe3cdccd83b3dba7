"""Reads all files from disk, which anyone may have written, damaged or replaced.

It opens regular files only, so it never waits for a pipe; it bounds sizes and parses JSON strictly. Errors are in words
and leave out the path, because callers know what the file is for. `schema.py` checks the content.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

MOST_BYTES = 1 << 31
"""Most bytes to read of a file of lines; the rest is ignored."""

_MOST_OF_DOCUMENT = 1 << 24
_LONGEST_LINE = 1 << 24
_DEEPEST = 32
_BLOCK = 1 << 20
_MARK = 256  # bytes kept from either end of the part read, to recognise the file again
_BOM = b"\xef\xbb\xbf"
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

T = TypeVar("T")


class UnreadableError(ValueError):
    """A file, or a part of it, that is invalid."""


def why(error: Exception) -> str:
    """The error in words, without the path that the operating system repeats."""
    return (getattr(error, "strerror", None) if isinstance(error, OSError) else None) or str(error)


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading and refuse all else: a pipe would wait for a writer, a device may act on it.

    Raises:
        OSError: if it cannot be opened.
        UnreadableError: if it is not a regular file.
    """
    _require_regular(os.stat(path))
    ways = ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY")  # not all systems have all of them
    handle = os.open(path, os.O_RDONLY | sum(getattr(os, way, 0) for way in ways))
    try:
        _require_regular(os.fstat(handle))  # it may have been replaced since
    except UnreadableError:
        os.close(handle)
        raise
    return os.fdopen(handle, "rb")


def read_json(path: Path, most: int = _MOST_OF_DOCUMENT) -> Any:
    """Read and parse a JSON file of at most `most` bytes.

    Raises:
        OSError: if it cannot be opened.
        UnreadableError: if it is not a regular file, too large, or not JSON.
    """
    with open_file(path) as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise UnreadableError(f"it is larger than {most >> 20} MB")
    return parse(text)


def parse(text: bytes) -> Any:
    """Parse a JSON text. Accepts NaN and Infinity as numbers, as Python writes them.

    Raises:
        UnreadableError: if it is not JSON, repeats a key, or is nested too deeply.

    >>> parse(b'{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    """
    try:
        found = json.loads(text.removeprefix(_BOM).decode(), object_pairs_hook=_unique)
    except UnicodeDecodeError:
        raise UnreadableError("it is not UTF-8") from None
    except RecursionError:
        raise UnreadableError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise UnreadableError(f"it is no JSON ({error.msg} at character {error.pos})") from None
    except UnreadableError:
        raise
    except ValueError:  # Python rejects numbers of thousands of digits
        raise UnreadableError("it has a number of too many digits") from None
    if text.count(b"[") + text.count(b"{") > _DEEPEST and _is_deeper(found, _DEEPEST):
        raise UnreadableError("it is nested too deeply")
    return found


class Lines(Generic[T]):
    """A growing file of one JSON object per line; `more()` reads the lines added since the last call.

    A file that was replaced, rewritten or truncated is read from the start again.

    Args:
        path: the file.
        check: converts a parsed line; raises ValueError for a bad line, which is skipped.

    Attributes:
        restarts: how often reading had to start over.
        is_too_large: whether the file is larger than the part that is read.
    """

    def __init__(self, path: Path, check: Callable[[Any], T]) -> None:
        self.path = path
        self.restarts = 0
        self._check = check
        self._identity = (0, 0)
        self._reset()

    def _reset(self) -> None:
        self._bad = self._number = self._position = 0
        self._first_bad = ""
        self._marks = (b"", b"")
        self._within_long = self.is_too_large = False

    @property
    def position(self) -> int:
        """The number of bytes read: the end of a complete line."""
        return self._position

    @property
    def notice(self) -> str:
        """What was left out and why, in words; empty if nothing."""
        said = []
        if self._bad:
            lines = "1 line was" if self._bad == 1 else f"{self._bad:,} lines were"
            which = "" if self._bad == 1 else "the first, "
            said.append(f"{lines} left out; {which}{self._first_bad}")
        if self.is_too_large:
            said.append(f"what comes after {MOST_BYTES >> 30} GB is left out")
        return f"{self.path}: {'; '.join(said)}" if said else ""

    def more(self) -> Iterator[tuple[bytes, T]]:
        """The valid lines added since the last call, as text and as converted by `check`.

        A last line without a newline is left for later: it is being written, or a kill cut it short.

        Raises:
            OSError: if the file cannot be opened.
            UnreadableError: if it is not a regular file.
        """
        with open_file(self.path) as file:
            if not self._goes_on(file):
                self.restarts += self._position > 0
                self._reset()
            for text in self._whole(file):
                self._number += 1
                if text is None:
                    self._leave_out(f"it is longer than {_LONGEST_LINE >> 20} MB")
                    continue
                if not text.strip():
                    continue
                try:
                    found = self._check(parse(text))
                except ValueError as error:
                    self._leave_out(str(error))
                    continue
                yield text + b"\n", found
            self._marks = _marks(file, self._position)

    def _leave_out(self, reason: str) -> None:
        self._bad += 1
        self._first_bad = self._first_bad or f"line {self._number:,}: {reason}"

    def _goes_on(self, file: BinaryIO) -> bool:
        """Whether this is the same file as before, its read part unchanged."""
        about = os.fstat(file.fileno())
        before, self._identity = self._identity, (about.st_dev, about.st_ino)
        same = before == self._identity and about.st_size >= self._position
        return same and _marks(file, self._position) == self._marks

    def _whole(self, file: BinaryIO) -> Iterator[bytes | None]:
        """The complete lines after the position, without newlines; None for a line that is too long."""
        file.seek(self._position)
        rest = b""
        while block := file.read(_BLOCK):
            *whole, rest = (rest + block).split(b"\n")
            for text in whole:
                self._position += len(text) + 1
                if self._within_long:
                    self._within_long = False  # the long line ends here
                else:
                    yield text
            if len(rest) > _LONGEST_LINE or (rest and self._within_long):
                self._position += len(rest)
                rest = b""
                if not self._within_long:
                    self._within_long = True
                    yield None
            if self._position >= MOST_BYTES:
                self.is_too_large = True
                return


def _marks(file: BinaryIO, position: int) -> tuple[bytes, bytes]:
    """The first and the last bytes before `position`."""
    size = min(_MARK, position)
    file.seek(0)
    first = file.read(size)
    file.seek(position - size)
    return first, file.read(size)


def _require_regular(about: os.stat_result) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise UnreadableError(f"it is {_KINDS.get(stat.S_IFMT(about.st_mode), 'something else')}, not a file")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise UnreadableError("it has a key twice")
    return found


def _is_deeper(value: Any, most: int) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    entries = value.values() if isinstance(value, dict) else value
    return most == 0 or any(_is_deeper(entry, most - 1) for entry in entries)
