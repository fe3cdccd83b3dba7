"""Sharded replicas: each is several ranks, which hold parts of one model. A device mesh says which.

Tensors are averaged part by part, between the ranks that hold the same part of different replicas. Messages go between
all ranks, so that every rank knows and raises the same; a replica's numbers are the mean over its ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hdet._replicas.group import Replicas
from hdet._replicas.lookout import Lookout

_NAMES = ("replicate", "dp_replicate")


class ShardedReplicas(Replicas):
    """The replicas of a device mesh, seen from one rank.

    Args:
        mesh: its dimension "replicate" or "dp_replicate", the first one if there is none of that name, counts the
            replicas; the others are the parts of each.

    Attributes:
        members: the global ranks of this replica.
    """

    wrapping_broadcasts = False
    noun = "rank"

    def __init__(self, mesh: DeviceMesh) -> None:
        dim = replicate_dim(mesh)
        super().__init__(mesh.get_group(dim))
        self._by_replica: list[list[int]] = mesh.mesh.movedim(dim, 0).reshape(self.size, -1).tolist()
        self.members = self._by_replica[self.rank]
        self.device = torch.device(mesh.device_type)
        self._whole = Replicas(_group_of([rank for ranks in self._by_replica for rank in ranks]))

    @property
    def ranks(self) -> Replicas:
        """All ranks of the mesh."""
        return self._whole

    def all_true(self, mine: bool) -> bool:
        """Whether this holds on every rank. Collective."""
        return all(row[0] for row in self._whole.gather(torch.tensor([mine], dtype=torch.float64, device=self.device)))

    def gather(self, values: Tensor) -> list[list[float]]:
        """Every replica's numbers: the mean of its ranks' vectors."""
        table = self._whole.gather(values)
        place = (lambda rank: rank) if self._whole.group is None else self._place
        rows = [[table[place(rank)] for rank in ranks] for ranks in self._by_replica]
        return [[sum(column) / len(column) for column in zip(*part, strict=True)] for part in rows]

    def close(self) -> None:
        """Give back the process groups."""
        super().close()
        self._whole.close()

    def lookout(self) -> Lookout | None:
        """Of all ranks."""
        return self._whole.lookout()

    def _place(self, rank: int) -> int:
        assert self._whole.group is not None
        return dist.get_group_rank(self._whole.group, rank)


def replicate_dim(mesh: DeviceMesh) -> int:
    """The dimension of the mesh that counts the replicas."""
    names = mesh.mesh_dim_names or ()
    return next((names.index(name) for name in _NAMES if name in names), 0)


_groups: dict[tuple[dist.ProcessGroup | None, tuple[int, ...]], dist.ProcessGroup] = {}


def _group_of(ranks: list[int]) -> dist.ProcessGroup | None:
    """The group of these ranks; None for all ranks. Made once."""
    if len(ranks) == dist.get_world_size():
        return None
    key = dist.group.WORLD, tuple(sorted(ranks))
    if key not in _groups:
        _groups[key] = dist.new_group(sorted(ranks), use_local_synchronization=True)
    return _groups[key]
