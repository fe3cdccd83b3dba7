"""Which replica's sinks write: the first one of the ensemble that a record comes from."""

from __future__ import annotations

import torch.distributed as dist

from hdet._replicas import find_replicas
from hdet.records.record import RoundRecord


def writes(record: RoundRecord, process_group: dist.ProcessGroup | None) -> bool:
    """Whether the caller is the replica that writes files and talks to trackers.

    Args:
        record: what is to be written. An ensemble's says which replica of it this is.
        process_group: the replicas that a sink was given; None for those of the ensemble.
    """
    if process_group is None and record.replica is not None:
        return record.replica == 0
    return find_replicas(process_group).rank == 0
