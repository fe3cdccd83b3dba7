"""A run's progress: one updating line on a terminal, or occasional lines in a log."""

from __future__ import annotations

import math
import sys
import time
from typing import Any, TextIO

from hdet._explore.hyperparameter import is_of
from hdet._replicas import Where
from hdet.records.record import RoundRecord
from hdet.records.sink import writes
from hdet.records.terminal import tqdm_class


class Progress:
    """A sink that shows a run's progress: round, range of the losses, learning rate, last move of the controller.

    On a terminal it redraws a bar (tqdm's, if installed); in a log it prints an occasional line, plus one for each
    event and for the end. Only the first replica prints.

    Args:
        seconds: time between two lines of a log.
        file: where to print; by default stderr.
        replicas: as in `hdet.Ensemble`; the first one prints. By default those of the ensemble.

    Example::

        ensemble = hdet.Ensemble(..., on_round=[hdet.Progress()])
    """

    def __init__(self, *, seconds: float = 30.0, file: TextIO | None = None, replicas: Where | None = None) -> None:
        self._seconds, self._file, self._replicas = seconds, file, replicas
        self._started = time.monotonic()
        self._last = -math.inf
        self._bar: Any = None

    def __call__(self, record: RoundRecord) -> None:
        """Show one record, or nothing if the last line is too recent."""
        if not writes(record, self._replicas):
            return
        file = self._file or sys.stderr
        if file.isatty():
            self._redraw(record, file)
            return
        now = time.monotonic()
        if now - self._last >= self._seconds or record.last or record.events:
            self._last = now
            for event in record.events:
                print(f"hdet: step {record.step}: {event}", file=file)
            print(f"hdet: {_where(record)}, {describe(record)}", file=file, flush=True)

    def _redraw(self, record: RoundRecord, file: TextIO) -> None:
        tqdm = tqdm_class()
        if tqdm is None:
            print(
                f"\r\x1b[2K{_where(record)}, {describe(record)}"[:200],
                end="\n" if record.last else "",
                file=file,
                flush=True,
            )
            return
        if self._bar is None:
            self._bar = tqdm(total=record.total_steps, file=file, dynamic_ncols=True, unit=" steps")
        for event in record.events:
            self._bar.write(f"step {record.step}: {event}", file=file)
        self._bar.set_postfix_str(f"round {record.round}, {describe(record)}", refresh=False)
        self._bar.update(record.step - self._bar.n)
        if record.last:
            self._bar.close()
            self._bar = None


def describe(record: RoundRecord) -> str:
    """A round in a few words.

    >>> from hdet.records.record import HyperparameterRecord
    >>> rate = HyperparameterRecord(0.1, 0.2, (0.18, 0.22), 2.5, 2.5, scale_before=2.0)
    >>> describe(RoundRecord(3, 40, True, (2.25, 2.5), {"learning_rate": rate}, steps=10))
    'loss 2.250 to 2.500, learning_rate 0.2 (schedule 0.1), raised by 25 %'
    """
    finite = [loss for loss in record.judged if math.isfinite(loss)]
    words = [f"loss {min(finite):.3f} to {max(finite):.3f}"] if finite else []
    if not finite and record.loss is not None:
        words = [f"loss {record.loss:.3f}"]
    rows = record.hyperparameters
    rate = next((name for name in rows if is_of(name, "learning_rate")), next(iter(rows), None))
    if rate is not None:
        row = rows[rate]
        schedule = "" if row.center == row.base else f" (schedule {row.base:.3g})"
        words.append(f"{rate} {row.center:.3g}{schedule}")
    words += _decisions(record, rate)
    if record.trend not in ("", "falls"):
        words.append("not learning: the losses have not clearly fallen since the start")
    return ", ".join(words)


def _decisions(record: RoundRecord, rate: str | None) -> list[str]:
    moved = {name: row.decision for name, row in record.hyperparameters.items() if row.decision not in ("", "kept")}
    if not moved:
        return ["kept"] if any(row.explored for row in record.hyperparameters.values()) else []
    shown = [text if name == rate else f"{name} {text}" for name, text in moved.items()]
    return shown[:3] if len(shown) <= 3 else [*shown[:3], f"{len(shown) - 3} more"]


def _where(record: RoundRecord) -> str:
    of = "" if record.total_steps is None else f"/{record.total_steps}"
    return f"round {record.round}, step {record.step}{of}"
