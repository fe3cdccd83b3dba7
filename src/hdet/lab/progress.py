"""How far a run is: a bar on a terminal, a few plain lines in a log."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from typing import Any

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Progress of one run, shown by the first replica only.

    Args:
        title: what is being run.
        steps: how long it is.
        shown: False on the other replicas.
    """

    def __init__(self, title: str, steps: int, shown: bool) -> None:
        self._title, self._steps, self._shown = title, steps, shown
        self._started = self._last = time.monotonic()
        self._bar = _bar(title, steps) if shown and sys.stderr.isatty() else None

    def step(self) -> None:
        """One step was taken."""
        if self._bar is not None:
            self._bar.update()

    def show(self, step: int, loss: float, rates: str) -> None:
        """The state of things after `step` steps."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.3f}, lr {rates}", refresh=False)
            return
        now = time.monotonic()
        if self._shown and (now - self._last >= _SECONDS_BETWEEN_LINES or step == self._steps):
            self._last = now
            left = (now - self._started) / step * (self._steps - step)
            at = f"step {step}/{self._steps}, loss {loss:.3f}, lr {rates}"
            print(f"{self._title}: {at}, {left:.0f} s left", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the bar as it is and go to the next line."""
        if self._bar is not None:
            self._bar.close()


def _bar(title: str, steps: int) -> Any:
    try:
        tqdm = importlib.import_module("tqdm")
    except ModuleNotFoundError:
        return None
    tqdm.tqdm.set_lock(threading.RLock())  # its own is a semaphore that outlives a replica that is killed
    return tqdm.tqdm(total=steps, desc=title, dynamic_ncols=True, mininterval=0.2)
