"""The one reader of what lies on the disk: files that anyone may have written, damaged or replaced meanwhile.

Only regular files are opened, so nothing waits for a pipe; sizes are bounded; JSON is parsed strictly. What is wrong is
said in words, without the path: callers know what the file is for. `schema.py` checks what is in it.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

MOST_BYTES = 1 << 31
"""Of a file of lines. What comes after is left out."""

_MOST_OF_DOCUMENT = 1 << 24
_LONGEST_LINE = 1 << 24
_DEEPEST = 32
_BLOCK = 1 << 20
_MARK = 256  # bytes at either end of what was read, by which a file is known again
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
    """A file, or a part of one, that is not what it must be."""


def why(error: Exception) -> str:
    """What went wrong, without the path that the operating system repeats."""
    return (getattr(error, "strerror", None) if isinstance(error, OSError) else None) or str(error)


def open_file(path: Path) -> BinaryIO:
    """A regular file, to be read. Nothing else is opened: a pipe would wait for a writer, a device may act on it.

    Raises:
        OSError: if it cannot be opened.
        UnreadableError: if it is no regular file.
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
    """What a JSON file of at most so many bytes holds.

    Raises:
        OSError: if it cannot be opened.
        UnreadableError: if it is no regular file, too large, or no JSON.
    """
    with open_file(path) as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise UnreadableError(f"it is larger than {most >> 20} MB")
    return parse(text)


def parse(text: bytes) -> Any:
    """What a JSON text holds. NaN and Infinity are taken as numbers, as Python writes them.

    Raises:
        UnreadableError: if it is no JSON, has a key twice, or is nested too deeply.

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
    except ValueError:  # Python takes no number of thousands of digits
        raise UnreadableError("it has a number of too many digits") from None
    if text.count(b"[") + text.count(b"{") > _DEEPEST and _is_deeper(found, _DEEPEST):
        raise UnreadableError("it is nested too deeply")
    return found


class Lines(Generic[T]):
    """A file of one JSON object per line, read as far as it goes; `more()` reads what was added since.

    A file that was replaced, rewritten or cut short is read from the beginning again.

    Args:
        path: the file.
        check: from a parsed line to what is wanted of it; raises ValueError for a bad one, which is left out.

    Attributes:
        restarts: how often what was read before turned out to be gone.
        is_too_large: whether there is more of it than is read.
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
        """Up to which byte the file was read: the end of a whole line."""
        return self._position

    @property
    def notice(self) -> str:
        """What was left out and why, in words; empty if nothing was."""
        said = []
        if self._bad:
            lines = "1 line was" if self._bad == 1 else f"{self._bad:,} lines were"
            which = "" if self._bad == 1 else "the first, "
            said.append(f"{lines} left out; {which}{self._first_bad}")
        if self.is_too_large:
            said.append(f"what comes after {MOST_BYTES >> 30} GB is left out")
        return f"{self.path}: {'; '.join(said)}" if said else ""

    def more(self) -> Iterator[tuple[bytes, T]]:
        """The good ones of the whole lines that were added, as text and as what `check` makes of them.

        A last line without an end is left for later: it is being written, or a kill has cut it short.

        Raises:
            OSError: if the file cannot be opened.
            UnreadableError: if it is no regular file.
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
        """Whether this is the file of before, with what was read of it."""
        about = os.fstat(file.fileno())
        before, self._identity = self._identity, (about.st_dev, about.st_ino)
        same = before == self._identity and about.st_size >= self._position
        return same and _marks(file, self._position) == self._marks

    def _whole(self, file: BinaryIO) -> Iterator[bytes | None]:
        """The lines that are there from the position on, without their ends; None for one that is too long."""
        file.seek(self._position)
        rest = b""
        while block := file.read(_BLOCK):
            *whole, rest = (rest + block).split(b"\n")
            for text in whole:
                self._position += len(text) + 1
                if self._within_long:
                    self._within_long = False  # that was its end
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
