"""How another process is: certain, and known at once, on the same host."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

State = Literal["runs", "stopped", "ended"]
Identity = Sequence[Any]
"""A process, for others to find: its host, its number there, and when it began."""


def identity() -> Identity:
    """This process."""
    pid = os.getpid()
    return [_host(), pid, _stat(pid)[1]]


def state(other: Identity) -> State | None:
    """How that process is; None if that cannot be seen from here."""
    host, pid, began = other
    return process_state(pid, began) if host == _host() and isinstance(pid, int) else None


def process_state(pid: int, began: str = "") -> State | None:
    """How a process of this host is; None if that cannot be asked.

    Args:
        pid: its number.
        began: when it began, if that is known: the number may be another's now.
    """
    if os.name == "nt":  # there signal 0 is no question, but Ctrl-C
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "ended"
    except OSError:  # it is somebody else's, but it is there
        return "runs"
    letter, now = _stat(pid)
    if letter in ("Z", "X") or (began and now and now != began):  # its parent has not heard of it; it is another one
        return "ended"
    return "stopped" if letter in ("T", "t") else "runs"


@functools.cache
def _host() -> str:
    """What tells hosts apart, and containers of one host that number their processes by themselves."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {os.name}"


def _stat(pid: int) -> tuple[str, str]:
    """The state of a process, as a letter, and when it began, in ticks since the host did; empty without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
