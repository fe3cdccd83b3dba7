"""Records in Weights & Biases."""

from __future__ import annotations

from typing import Any

from hdet.records.record import RoundRecord
from hdet.records.trackers.tracker import Tracker, load


class WandB(Tracker):
    """Numbers over their own step axis, so they mix with your own logging.

    Args:
        run: what `wandb.init()` returned; by default the run under way.
        **options: `prefix` and `replicas` of `Tracker`.
    """

    def __init__(self, run: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self._wandb = load("wandb", "wandb")
        self._run = run
        self._defined = False

    def log(self, numbers: dict[str, float], record: RoundRecord) -> None:
        """Log under `prefix`, over `prefix`step."""
        run = self._run or self._wandb.run
        if run is None:
            raise RuntimeError("WandB needs a run: call wandb.init() on the first replica, or pass WandB(run)")
        step = f"{self._prefix}step"
        if not self._defined:
            run.define_metric(step)
            run.define_metric(f"{self._prefix}*", step_metric=step)
            self._defined = True
        run.log({**numbers, step: record.step})
