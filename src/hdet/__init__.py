"""HDET: data-parallel replicas that tune their hyperparameters while they train.

Read `hdet.ensemble` first: its `step()` is the protocol.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hdet.controllers import Auto, Controller, Fixed, Limits, LineSearch, Observation, Plan, Report, Slope, Softmax
from hdet.ensemble import Ensemble
from hdet.hyperparameters.dropout import dropout
from hdet.hyperparameters.hyperparameter import Hyperparameter
from hdet.hyperparameters.in_forward import Scalar, attribute, scalar
from hdet.hyperparameters.in_groups import learning_rate, momentum, weight_decay
from hdet.in_process import ReplicaError, data_parallel, in_process
from hdet.json_lines import JSONLines, read_records
from hdet.one_cycle import OneCycleAutoLR
from hdet.outer_step import Nesterov
from hdet.probe.probe import Probe
from hdet.progress import Progress, describe
from hdet.range_test.find_lr import find_lr
from hdet.range_test.found_rate import FoundRate
from hdet.range_test.no_rate import FindLRError
from hdet.record import HyperparameterRecord, RoundRecord, SearchRecord, metrics
from hdet.replicas import LostReplicaError, find_replicas
from hdet.rollback.rollback import Rollback
from hdet.warm_init import warm_init

if TYPE_CHECKING:
    from hdet import trackers
    from hdet.checkpoint.load import Checkpoint, load
    from hdet.checkpoint.save import save
    from hdet.checkpoint.sharded import replica_key
    from hdet.replay import ReplayLR, make_schedule

__version__ = "0.1.0"

__all__ = [
    "Auto",
    "Checkpoint",
    "Controller",
    "Ensemble",
    "FindLRError",
    "Fixed",
    "FoundRate",
    "Hyperparameter",
    "HyperparameterRecord",
    "JSONLines",
    "Limits",
    "LineSearch",
    "LostReplicaError",
    "Nesterov",
    "Observation",
    "OneCycleAutoLR",
    "Plan",
    "Probe",
    "Progress",
    "ReplayLR",
    "ReplicaError",
    "Report",
    "Rollback",
    "RoundRecord",
    "Scalar",
    "SearchRecord",
    "Slope",
    "Softmax",
    "attribute",
    "data_parallel",
    "describe",
    "dropout",
    "find_lr",
    "find_replicas",
    "in_process",
    "learning_rate",
    "load",
    "make_schedule",
    "metrics",
    "momentum",
    "read_records",
    "replica_key",
    "save",
    "scalar",
    "trackers",
    "warm_init",
    "weight_decay",
]

# What not every run needs is imported when it is asked for.
_LATER = {
    "Checkpoint": "hdet.checkpoint.load",
    "ReplayLR": "hdet.replay",
    "load": "hdet.checkpoint.load",
    "make_schedule": "hdet.replay",
    "replica_key": "hdet.checkpoint.sharded",
    "save": "hdet.checkpoint.save",
    "trackers": "hdet.trackers",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'hdet' has no attribute {name!r}")
    module = importlib.import_module(_LATER[name])
    return module if name == "trackers" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
