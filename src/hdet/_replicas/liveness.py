"""The state of another process: known for certain and at once on the same host."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

State = Literal["runs", "stopped", "ended"]
Identity = Sequence[Any]
"""Identifies a process to others: its host, its number there, and its start time."""


def identity() -> Identity:
    """This process."""
    pid = os.getpid()
    return [_host(), pid, _stat(pid)[1]]


def state(other: Identity) -> State | None:
    """The state of that process; None if it cannot be seen from here."""
    host, pid, began = other
    return process_state(pid, began) if host == _host() and isinstance(pid, int) else None


def process_state(pid: int, began: str = "") -> State | None:
    """The state of a process on this host; None if it cannot be determined.

    Args:
        pid: its number.
        began: its start time, if known: the number may have been reused.
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
    """A name that distinguishes hosts, and containers of one host with their own process numbers."""
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
