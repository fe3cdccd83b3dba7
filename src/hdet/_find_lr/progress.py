"""A line on the terminal while a search is under way; nothing in a log."""

from __future__ import annotations

import sys
import time

_SECONDS = 0.2  # between two of them


class ProgressLine:
    """How far a search is, on stderr where that is a terminal.

    Args:
        most: the most steps that it takes.
        shown: whether this replica shows it.
    """

    def __init__(self, most: int, shown: bool) -> None:
        self._most = most
        self._shown = shown and sys.stderr is not None and sys.stderr.isatty()
        self._last = 0.0

    def show(self, steps: int, rate: float) -> None:
        """After so many steps, with the one at this rate under way."""
        now = time.monotonic()
        if self._shown and now - self._last >= _SECONDS:
            self._last = now
            text = f"finding the learning rate: step {steps + 1} of at most {self._most}, trying {rate:.2g}"
            print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the line empty."""
        if self._shown and self._last:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
