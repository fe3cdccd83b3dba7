"""The replicas: ranks of a process group, parts of a device mesh, or threads of one process.

Nothing else in the library issues collectives.
"""

from hdet._replicas.find import Where, check_where, find_replicas, seated
from hdet._replicas.group import Replicas, Travelling, collective_device, weigh
from hdet._replicas.notes import LostReplicaError
from hdet._replicas.sharded import ShardedReplicas

__all__ = [
    "LostReplicaError",
    "Replicas",
    "ShardedReplicas",
    "Travelling",
    "Where",
    "check_where",
    "collective_device",
    "find_replicas",
    "seated",
    "weigh",
]
