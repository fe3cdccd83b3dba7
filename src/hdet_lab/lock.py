"""A lock for one process at a time in a run folder, released whenever and however its process ends.

The package filelock does not replace it: filelock leaves its file in the run folder, its older versions erase the
holder's name when another process asks for the lock, and without flock it falls back to a marker file, which a killed
run leaves behind and other hosts then wait for.
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
    """Keep other processes out of `folder`; create it if missing, and remove it again if it stays empty.

    Reentrant within a process. The lock is a kernel lock (flock), so a killed process releases it. Without flock, as on
    Windows and on some network drives, there is no protection.

    Raises:
        FolderError: if another process holds the lock; the message names it.
    """
    place = folder.resolve()
    is_something_else = folder.exists() and not folder.is_dir()  # whoever writes there will refuse it
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
    """Return the open lock file, which names its holder and is locked until closed."""
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
        file.close()  # its holder has just removed it
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def _flock(file: TextIO) -> bool:
    """Lock the file; False if another process has it."""
    try:
        fcntl: Any = importlib.import_module("fcntl")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return True
    return True
