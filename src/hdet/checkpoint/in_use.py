"""One run at a time saves to a folder: the first replica's process locks it as long as its run goes on.

The lock is the kernel's, on the folder itself: no file lies there, that of a killed process is free, and processes that
were forked for data do not hold it. Where the file system has no such lock, as NFS for folders, there is no protection.

Within a process the newest run to save has the folder: one that has ended with an error, or whose notebook cell was run
again, may be referenced for long. A run holds only the folder that it saved to last.
"""

from __future__ import annotations

import importlib
import os
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hdet._user_warning import warn

PATIENCE = 20.0  # seconds for a process that was killed to be gone, and for the rest of a run that was restarted
_SILENCE = 2.0  # of them; then it is said what is waited for


class FolderInUseError(Exception):
    """Another run saves to this folder."""


@dataclass
class _Lock:
    handle: int
    owner: int
    end: weakref.finalize[Any, Any]  # the owner's


_held: dict[Path, _Lock] = {}  # by this process


def hold(folder: Path, owner: Any, lone: bool = False) -> None:
    """Keep other processes from saving to `folder` while `owner` lives, saves nowhere else and was not let go.

    Args:
        folder: it is there.
        owner: whose folder it is.
        lone: the owner is no run but this one call, and takes the folder from nobody in this process.

    Raises:
        FolderInUseError: if another process does.
    """
    place = folder.resolve()
    for other, lock in list(_held.items()):
        if not _is_at(lock, other) or (lock.owner == id(owner) and other != place):
            _close(other)
    held = _held.get(place)
    if held is not None and (lone or held.owner == id(owner)):
        return
    handle = _take(place) if held is None else held.handle
    if held is not None:
        held.end.detach()
    if handle is not None:
        end = weakref.finalize(owner, _leave, place, id(owner))
        end.atexit = False
        _held[place] = _Lock(handle, id(owner), end)


def let_go(owner: Any) -> None:
    """The owner's run is over: give back the folder that it saved to."""
    for place in list(_held):
        _leave(place, id(owner))


def _leave(place: Path, owner: int) -> None:
    lock = _held.get(place)
    if lock is not None and lock.owner == owner:
        _close(place)


def _take(place: Path) -> int | None:
    """A handle that locks the folder as long as it is open; None if it cannot be locked."""
    try:
        fcntl: Any = importlib.import_module("fcntl")
        handle = os.open(place, os.O_RDONLY)
    except (ImportError, OSError):
        return None
    began, told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            waited = time.monotonic() - began
        except OSError:
            os.close(handle)
            return None
        if waited > PATIENCE:
            by = _holder(handle) or "its process"
            os.close(handle)
            raise FolderInUseError(
                f"another run, in another process, saves to {place}: give each run a folder of its own, for example "
                f"{place}-2, or end the other one first ({by}, or in a notebook its ensemble.close()). What is left of "
                f"a run that was restarted was given {PATIENCE:g} s to end"
            )
        if waited > _SILENCE and not told:
            told = True
            by = _holder(handle) or "another process"
            warn(
                f"another run ({by}) saves to {place}: waiting up to {PATIENCE:g} s for it to end, as it may be what "
                "is left of one that was restarted"
            )
        time.sleep(0.05)


def _holder(handle: int) -> str:
    """The process that holds the lock, in words; empty if the system does not tell."""
    at = os.fstat(handle)
    device = f"{os.major(at.st_dev):02x}:{os.minor(at.st_dev):02x}:{at.st_ino}"
    try:
        rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return ""
    found = [row[4] for row in rows if row[1:2] == ["FLOCK"] and row[5:6] == [device]]
    return f"process {found[0]}" if found and found[0] != "0" else ""  # 0: of another container


def _is_at(lock: _Lock, place: Path) -> bool:
    """Whether the folder is there still, and not another one in its place."""
    try:
        return os.path.samestat(os.fstat(lock.handle), os.stat(place))
    except OSError:
        return False


def _close(place: Path) -> None:
    lock = _held.pop(place, None)
    if lock is not None:
        lock.end.detach()
        os.close(lock.handle)


def _forget() -> None:
    """In a process that was forked: the lock is the parent's."""
    for place in list(_held):
        _close(place)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
