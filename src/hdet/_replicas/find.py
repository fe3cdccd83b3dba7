"""Which replica the caller is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hdet._replicas.group import Replicas
from hdet._replicas.sharded import ShardedReplicas

Where = dist.ProcessGroup | DeviceMesh
"""Where the replicas are: the ranks of a group, or the first dimension of a mesh."""

_here = threading.local()


def find_replicas(where: Where | None = None) -> Replicas:
    """The replicas that the caller is one of: those of `hdet.in_process`, or the ranks of a process group or mesh."""
    seat: Replicas | None = getattr(_here, "seat", None)
    if isinstance(where, DeviceMesh):
        return ShardedReplicas(where)
    return Replicas(where) if seat is None or where is not None else seat


@contextmanager
def seated(replicas: Replicas) -> Iterator[None]:
    """Within it `find_replicas()` finds `replicas`, in this thread."""
    _here.seat = replicas
    try:
        yield
    finally:
        _here.seat = None
