"""Records in TensorBoard."""

from __future__ import annotations

import os
from typing import Any

from hdet.records.record import RoundRecord
from hdet.records.trackers.tracker import Tracker, load


class TensorBoard(Tracker):
    """Scalars by step, and events as text.

    Args:
        where: a folder, or a `SummaryWriter` of yours.
        **options: `prefix` and `replicas` of `Tracker`.
    """

    def __init__(self, where: str | os.PathLike[str] | Any, **options: Any) -> None:
        super().__init__(**options)
        self._module = load("torch.utils.tensorboard", "tensorboard")
        self._where = where
        self._writer: Any = where if hasattr(where, "add_scalar") else None

    def log(self, numbers: dict[str, float], record: RoundRecord) -> None:
        """Write and flush."""
        if self._writer is None:  # made only by the replica that writes
            self._writer = self._module.SummaryWriter(os.fspath(self._where))
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, record.step)
        for event in record.events:
            self._writer.add_text(f"{self._prefix}events", event, record.step)
        self._writer.flush()
