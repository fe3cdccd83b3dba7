"""One run at a time saves to a folder: the first replica's process locks it until its run ends.

It is a kernel lock on the folder itself: there is no lock file, a killed process releases it, and forked data workers
do not hold it. File systems without such locks, such as NFS for folders, get no protection.

Within a process, the newest run to save gets the folder: a run that failed, or whose notebook cell was executed again,
may stay referenced for long. A run holds only the folder that it saved to last.
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

PATIENCE = 20.0  # seconds to wait for a killed process, or for the remains of a restarted run, to end
_SILENCE = 2.0  # seconds to wait before warning


class FolderInUseError(Exception):
    """Another run saves to this folder."""


@dataclass
class _Lock:
    handle: int
    owner: int
    end: weakref.finalize[Any, Any]  # the owner's


_held: dict[Path, _Lock] = {}  # by this process


def hold(folder: Path, owner: Any, lone: bool = False) -> None:
    """Lock `folder` against other processes until `owner` is collected, saves elsewhere, or is passed to `let_go()`.

    Args:
        folder: an existing folder.
        owner: the run that saves to it.
        lone: the owner is a single call, not a run; it does not take the folder from a run in this process.

    Raises:
        FolderInUseError: if another process holds the lock.
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
    """Release the folder that the owner saved to, because its run is over."""
    for place in list(_held):
        _leave(place, id(owner))


def _leave(place: Path, owner: int) -> None:
    lock = _held.get(place)
    if lock is not None and lock.owner == owner:
        _close(place)


def _take(place: Path) -> int | None:
    """Return a handle that locks the folder while it is open; None if the folder cannot be locked."""
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
                f"{place}-2, or end the other one first ({by}, or in a notebook its ensemble.close()). The remains of "
                f"a restarted run had {PATIENCE:g} s to end"
            )
        if waited > _SILENCE and not told:
            told = True
            by = _holder(handle) or "another process"
            warn(
                f"another run ({by}) saves to {place}: waiting up to {PATIENCE:g} s for it to end, as it may be the "
                "remains of a restarted run"
            )
        time.sleep(0.05)


def _holder(handle: int) -> str:
    """The process that holds the lock, in words; empty if the system does not say."""
    at = os.fstat(handle)
    device = f"{os.major(at.st_dev):02x}:{os.minor(at.st_dev):02x}:{at.st_ino}"
    try:
        rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return ""
    found = [row[4] for row in rows if row[1:2] == ["FLOCK"] and row[5:6] == [device]]
    return f"process {found[0]}" if found and found[0] != "0" else ""  # 0: in another container


def _is_at(lock: _Lock, place: Path) -> bool:
    """Whether the locked folder still exists at `place` and was not replaced."""
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
    """Drop the locks in a forked process: they belong to the parent."""
    for place in list(_held):
        _close(place)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
