"""Which replica the caller is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hdet._replicas.group import NOT_IN_IT, Replicas
from hdet._replicas.sharded import ShardedReplicas

Where = dist.ProcessGroup | DeviceMesh
"""Where the replicas are: the ranks of a group, or the first dimension of a mesh."""

_here = threading.local()


def check_where(replicas: object) -> Where | None:
    """Check the argument `replicas`.

    Raises:
        TypeError: if it is neither a process group nor a mesh.
    """
    if replicas is None or isinstance(replicas, Where):
        return replicas
    if replicas is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(NOT_IN_IT)
    raise TypeError(
        f"replicas must be a process group or a DeviceMesh, got {replicas!r}; write for example "
        'replicas=init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))'
    )


def find_replicas(where: Where | None = None) -> Replicas:
    """The replicas that the caller is one of: those of `hdet.in_process`, or the ranks of a process group or mesh."""
    where = check_where(where)
    seat: Replicas | None = getattr(_here, "seat", None)
    if isinstance(where, DeviceMesh):
        return ShardedReplicas(where)
    return Replicas(where) if seat is None or where is not None else seat


@contextmanager
def seated(replicas: Replicas) -> Iterator[None]:
    """Make `find_replicas()` return `replicas` within this context, in this thread."""
    _here.seat = replicas
    try:
        yield
    finally:
        _here.seat = None
