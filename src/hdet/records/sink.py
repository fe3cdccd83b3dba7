"""Decides which replica's sinks write: the first one of the record's ensemble."""

from __future__ import annotations

from hdet._replicas import Where, find_replicas
from hdet.records.record import RoundRecord


def writes(record: RoundRecord, replicas: Where | None) -> bool:
    """Whether the caller is the replica that writes files and talks to trackers.

    Args:
        record: the record to write. One from an ensemble says which replica this is.
        replicas: the sink's `replicas` argument; None for those of the ensemble.
    """
    if replicas is None and record.replica is not None:
        return record.replica == 0
    return find_replicas(replicas).ranks.rank == 0
