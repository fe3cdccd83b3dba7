"""HDET: data-parallel replicas that tune their hyperparameters while they train.

Read `hdet.ensemble` first: its `step()` is the protocol.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hdet._explore.dropout import dropout
from hdet._explore.hyperparameter import Hyperparameter
from hdet._explore.in_forward import Scalar, attribute, scalar
from hdet._explore.in_groups import learning_rate, momentum, weight_decay
from hdet._find_lr.find_lr import find_lr
from hdet._find_lr.found_rate import FoundRate
from hdet._find_lr.no_rate import FindLRError
from hdet._options.averaging import Averaging, Nesterov
from hdet._options.safety import Limits, Rollback, Safety
from hdet._probe.probe import Probe
from hdet._replicas import LostReplicaError, find_replicas
from hdet._tensors.warm_init import warm_init
from hdet.controllers import Auto, Controller, Fixed, LineSearch, Observation, Plan, Report, Slope, Softmax
from hdet.ensemble import Ensemble
from hdet.in_process import ReplicaError, data_parallel, in_process
from hdet.one_cycle import OneCycleAutoLR
from hdet.records.json_lines import JSONLines, read_records
from hdet.records.progress import Progress, describe
from hdet.records.record import HyperparameterRecord, RoundRecord, SearchRecord, metrics

if TYPE_CHECKING:
    from hdet.checkpoint.load import Checkpoint, load
    from hdet.checkpoint.save import save
    from hdet.checkpoint.sharded import replica_key
    from hdet.records import trackers
    from hdet.records.replay import ReplayLR, make_schedule

__version__ = "0.1.0"

__all__ = [
    "Auto",
    "Averaging",
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
    "Safety",
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
    "ReplayLR": "hdet.records.replay",
    "load": "hdet.checkpoint.load",
    "make_schedule": "hdet.records.replay",
    "replica_key": "hdet.checkpoint.sharded",
    "save": "hdet.checkpoint.save",
    "trackers": "hdet.records.trackers",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'hdet' has no attribute {name!r}")
    module = importlib.import_module(_LATER[name])
    return module if name == "trackers" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
