"""For torch.distributed.checkpoint: the key that a replica's tensors are saved under. docs/checkpoints.md shows how."""

from __future__ import annotations

from hdet.ensemble import Ensemble


def replica_key(ensemble: Ensemble) -> str:
    """The key for `dcp.save({key: state})`, and after the ensemble was loaded for `dcp.load({key: state})`.

    In mid-round a key per replica: without one, torch.distributed.checkpoint takes the replicas for copies of one
    model and saves a mix of them, without an error. At a round's end they are copies, and are saved once.

    Returns:
        "consensus", or in mid-round for example "replica-1-of-2".
    """
    if not ensemble.replicas_differ:
        return "consensus"
    return f"replica-{ensemble.replicas.rank}-of-{ensemble.replicas.size}"
