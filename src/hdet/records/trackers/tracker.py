"""The base class of trackers: the first replica sends the numbers of each round."""

from __future__ import annotations

import importlib
from typing import Any

from hdet._replicas import Where
from hdet.records.record import RoundRecord, metrics
from hdet.records.sink import writes


class Tracker:
    """A sink that passes on the numbers of a record.

    Args:
        prefix: prefix of the numbers' names.
        replicas: as in `hdet.Ensemble`; the first one logs. By default those of the ensemble.
    """

    def __init__(self, prefix: str = "hdet/", replicas: Where | None = None) -> None:
        self._prefix = prefix
        self._replicas = replicas

    def __call__(self, record: RoundRecord) -> None:
        """Tell one record."""
        if writes(record, self._replicas):
            self.log({f"{self._prefix}{name}": value for name, value in metrics(record).items()}, record)

    def log(self, numbers: dict[str, float], record: RoundRecord) -> None:
        """Log the numbers at `record.step`, and the events if the tracker takes text."""
        raise NotImplementedError


def load(module: str, extra: str) -> Any:
    """Import a tracker's package.

    Raises:
        ModuleNotFoundError: if it is not installed; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0] if extra != "tensorboard" else "tensorboard"
        raise ModuleNotFoundError(f"{package} is not installed: pip install 'hdet[{extra}]'") from error
