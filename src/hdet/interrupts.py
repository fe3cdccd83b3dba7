"""Ctrl-C, heard a little later: what must not be left half done is done first."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Within it Ctrl-C waits; at its end it is heard. Only the main thread hears it at all.

    >>> done = []
    >>> try:
    ...     with deferred_interrupts():
    ...         signal.raise_signal(signal.SIGINT)
    ...         done.append("all of it")
    ... except KeyboardInterrupt:
    ...     done.append("then the interrupt")
    >>> done
    ['all of it', 'then the interrupt']
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)  # None: not set by Python
        if heard:
            signal.raise_signal(signal.SIGINT)
