"""Records in trackio."""

from __future__ import annotations

from typing import Any

from hdet.records.record import RoundRecord
from hdet.records.trackers.tracker import Tracker, load


class Trackio(Tracker):
    """Numbers by step.

    Args:
        run: what `trackio.init()` returned; by default the run under way.
        **options: `prefix` and `replicas` of `Tracker`.
    """

    def __init__(self, run: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self._trackio = load("trackio", "trackio")
        self._run = run

    def log(self, numbers: dict[str, float], record: RoundRecord) -> None:
        """Log at the record's step."""
        if self._run is not None:
            self._run.log(numbers, step=record.step)
        else:
            self._trackio.log(numbers, step=record.step)
