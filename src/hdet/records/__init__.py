"""One record per round: as an object, a line of JSON, on the terminal, in trackers; and schedules made of them."""

import importlib
from typing import TYPE_CHECKING, Any

from hdet.records.json_lines import JSONLines, read_records
from hdet.records.progress import Progress, describe
from hdet.records.record import HyperparameterRecord, OnRound, RoundRecord, SearchRecord, metrics

if TYPE_CHECKING:
    from hdet.records import trackers
    from hdet.records.replay import ReplayLR, make_schedule

__all__ = [
    "HyperparameterRecord",
    "JSONLines",
    "OnRound",
    "Progress",
    "ReplayLR",
    "RoundRecord",
    "SearchRecord",
    "describe",
    "make_schedule",
    "metrics",
    "read_records",
    "trackers",
]

# Names that not every run needs are imported on first use.
_LATER = {"ReplayLR": "replay", "make_schedule": "replay", "trackers": "trackers"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'hdet.records' has no attribute {name!r}")
    module = importlib.import_module(f"hdet.records.{_LATER[name]}")
    return module if name == "trackers" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
