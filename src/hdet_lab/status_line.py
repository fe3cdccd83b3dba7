"""The progress of a run: a bar on a terminal, a few plain lines in a log."""

from __future__ import annotations

import sys
import time

from hdet.records.terminal import tqdm_class

_SECONDS_BETWEEN_LINES = 10.0


class StatusLine:
    """The progress of one run, shown by the first replica only.

    Args:
        title: name of the run.
        steps: length of the run; None if unknown.
        shown: False on the other replicas.
    """

    def __init__(self, title: str, steps: int | None, shown: bool) -> None:
        self._title, self._steps, self._shown = title, steps, shown
        self._started = self._last = time.monotonic()
        self._first = 0
        self._unsaid = ""  # the latest state if not printed yet
        tqdm = tqdm_class() if shown and sys.stderr.isatty() else None
        self._bar = tqdm and tqdm(total=steps, desc=title, dynamic_ncols=True, mininterval=0.2)

    def start_from(self, step: int) -> None:
        """Start after `step` steps, which this process did not take."""
        self._first = step
        if self._bar is not None:
            self._bar.initial = self._bar.n = step

    def step(self) -> None:
        """One step was taken."""
        if self._bar is not None:
            self._bar.update()

    def show(self, step: int, loss: float, rates: str) -> None:
        """Show the state after `step` steps."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.3f}, lr {rates}", refresh=False)
            return
        now = time.monotonic()
        of, left = "", ""
        if self._steps is not None:
            of = f"/{self._steps}"
            left = f", {(now - self._started) / (step - self._first) * (self._steps - step):.0f} s left"
        self._unsaid = f"{self._title}: step {step}{of}, loss {loss:.3f}, lr {rates}{left}"
        if now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            self._say()

    def close(self) -> None:
        """Leave the bar in place and go to the next line; print the final state."""
        self._say()
        if self._bar is not None:
            self._bar.close()

    def _say(self) -> None:
        if self._shown and self._unsaid:
            print(self._unsaid, file=sys.stderr, flush=True)
        self._unsaid = ""
