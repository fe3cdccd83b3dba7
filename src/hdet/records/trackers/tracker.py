"""What all trackers have in common: the first replica tells them the numbers of each round."""

from __future__ import annotations

import importlib
from typing import Any

from hdet._replicas import Where
from hdet.records.record import RoundRecord, metrics
from hdet.records.sink import writes


class Tracker:
    """A sink that passes the numbers of a record on.

    Args:
        prefix: what the names of the numbers begin with.
        replicas: who they are, as in `hdet.Ensemble`, of which the first tells; by default those of the ensemble.
    """

    def __init__(self, prefix: str = "hdet/", replicas: Where | None = None) -> None:
        self._prefix = prefix
        self._replicas = replicas

    def __call__(self, record: RoundRecord) -> None:
        """Tell one record."""
        if writes(record, self._replicas):
            self.log({f"{self._prefix}{name}": value for name, value in metrics(record).items()}, record)

    def log(self, numbers: dict[str, float], record: RoundRecord) -> None:
        """Pass the numbers on, at `record.step`; the events too, where there is a place for words."""
        raise NotImplementedError


def load(module: str, extra: str) -> Any:
    """A tracker's package.

    Raises:
        ModuleNotFoundError: with what to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0] if extra != "tensorboard" else "tensorboard"
        raise ModuleNotFoundError(f"{package} is not installed: pip install 'hdet[{extra}]'") from error
