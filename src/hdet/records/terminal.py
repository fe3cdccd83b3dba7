"""Text and bars on a terminal. Control characters in text from files are escaped, never obeyed."""

from __future__ import annotations

import importlib
import sys
import threading
from typing import Any, TextIO


def say(text: str, file: TextIO | None = None) -> None:
    """Print it, at once."""
    stream = sys.stdout if file is None else file
    print(printable(text, stream.encoding or "utf-8"), file=stream, flush=True)


def printable(text: str, encoding: str = "utf-8") -> str:
    r"""Escape control characters and characters that the encoding lacks.

    >>> printable("\x1b[31mred\nblue")
    '\\x1b[31mred\nblue'
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
    return text.encode(encoding, "backslashreplace").decode(encoding)


def tqdm_class() -> Any:
    """tqdm's bar, or None where tqdm is not installed.

    Replaces tqdm's lock, a semaphore that outlives a killed replica, with one of this process.
    """
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ModuleNotFoundError:
        return None
    tqdm.set_lock(threading.RLock())
    return tqdm
