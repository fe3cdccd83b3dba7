"""One process at a time in a run folder: a lock that is free again when its process ends, however it ends.

The package filelock does not replace it: filelock leaves its file in the run folder, its older versions erase the
holder's name when another process asks for the lock, and where there is no flock it falls back to a marker that a
killed run leaves for other hosts to wait for.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from hdet_lab.errors import FolderError, writing

LOCK = "run.lock"
_held: set[Path] = set()  # by this process


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of `folder`, which is made where there is none, and removed again if it stays empty.

    Within it, it may be called again.

    The lock is the kernel's (flock), so that of a killed process is free. Where there is no flock, as on Windows and on
    some network drives, there is no protection.

    Raises:
        FolderError: if another process is in it, with its name.
    """
    place = folder.resolve()
    is_something_else = folder.exists() and not folder.is_dir()  # refused by whoever is to write there
    if place in _held or is_something_else:
        yield
        return
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = _take(folder)
    _held.add(place)
    try:
        yield
    finally:
        _held.remove(place)
        with contextlib.suppress(OSError):
            (folder / LOCK).unlink()
            file.close()
            for path in made:
                path.rmdir()  # raises where something was written, which ends this


def _take(folder: Path) -> TextIO:
    """The file that is locked as long as it is open; it says by whom."""
    while True:
        file = open(folder / LOCK, "a+", errors="replace")  # noqa: SIM115
        if not _flock(file):
            file.seek(0)
            by = file.read(200).strip() or "another process"
            file.close()
            raise FolderError(f"a run is alive in {folder} ({by}); wait until it has ended, or end it first")
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(folder / LOCK)):
                break
        file.close()  # the one who had it has just removed it
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def _flock(file: TextIO) -> bool:
    """Lock it; False if another process has."""
    try:
        fcntl: Any = importlib.import_module("fcntl")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return True
    return True
