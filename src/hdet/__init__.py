"""HDET: data-parallel replicas that tune their hyperparameters while they train.

This module has the names that every run needs. The rest is in `hdet.controllers`, `hdet.records`, `hdet.checkpoint` and
`hdet.integrations`. Read `hdet.ensemble` first: its `step()` is the protocol.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hdet import controllers, records
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
from hdet.controllers.auto import Auto
from hdet.ensemble import Ensemble
from hdet.in_process import ReplicaError, data_parallel, in_process
from hdet.one_cycle import OneCycleAutoLR
from hdet.records.json_lines import JSONLines
from hdet.records.progress import Progress

if TYPE_CHECKING:
    from hdet import checkpoint
    from hdet.checkpoint.load import load
    from hdet.checkpoint.save import save

__version__ = "0.1.0"

__all__ = [
    "Auto",
    "Averaging",
    "Ensemble",
    "FindLRError",
    "FoundRate",
    "Hyperparameter",
    "JSONLines",
    "Limits",
    "LostReplicaError",
    "Nesterov",
    "OneCycleAutoLR",
    "Probe",
    "Progress",
    "ReplicaError",
    "Rollback",
    "Safety",
    "Scalar",
    "attribute",
    "checkpoint",
    "controllers",
    "data_parallel",
    "dropout",
    "find_lr",
    "find_replicas",
    "in_process",
    "learning_rate",
    "load",
    "momentum",
    "records",
    "save",
    "scalar",
    "warm_init",
    "weight_decay",
]

# Names that not every run needs are imported on first use.
_LATER = {"checkpoint": "hdet.checkpoint", "load": "hdet.checkpoint.load", "save": "hdet.checkpoint.save"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'hdet' has no attribute {name!r}")
    module = importlib.import_module(_LATER[name])
    return module if name == "checkpoint" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
