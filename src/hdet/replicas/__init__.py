"""Who the replicas are: the ranks of a process group, parts of a device mesh, or threads of one process.

Nothing else in the library issues collectives.
"""

from hdet.replicas.find import Where, find_replicas, seated
from hdet.replicas.group import Replicas, Travelling, collective_device, weigh
from hdet.replicas.notes import LostReplicaError
from hdet.replicas.sharded import ShardedReplicas

__all__ = [
    "LostReplicaError",
    "Replicas",
    "ShardedReplicas",
    "Travelling",
    "Where",
    "collective_device",
    "find_replicas",
    "seated",
    "weigh",
]
