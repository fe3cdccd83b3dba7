"""Records in MLflow."""

from __future__ import annotations

import re
from typing import Any

from hdet.records.record import RoundRecord
from hdet.records.trackers.tracker import Tracker, load

_REFUSED = re.compile(r"[^\w\-. /]", re.ASCII)  # MLflow raises for such names
_LONGEST = 250


class MLflow(Tracker):
    """Metrics by step.

    Args:
        run_id: the run to log to; by default the active one.
        **options: `prefix` and `replicas` of `Tracker`.
    """

    def __init__(self, run_id: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._mlflow = load("mlflow", "mlflow")
        self._run_id = run_id

    def log(self, numbers: dict[str, float], record: RoundRecord) -> None:
        """Log under names that MLflow accepts."""
        known = {_REFUSED.sub("_", name)[:_LONGEST]: value for name, value in numbers.items()}
        self._mlflow.log_metrics(known, step=record.step, run_id=self._run_id)
