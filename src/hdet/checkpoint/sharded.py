"""The key of a replica's tensors in torch.distributed.checkpoint. docs/checkpoints.md shows how to use it."""

from __future__ import annotations

from hdet.ensemble import Ensemble


def replica_key(ensemble: Ensemble) -> str:
    """The key for `dcp.save({key: state})` and, once the ensemble is loaded, for `dcp.load({key: state})`.

    In mid-round each replica has its own key: without one, torch.distributed.checkpoint treats the replicas as copies
    of one model and silently saves a mix of them. At a round's end they are copies and are saved once.

    Returns:
        "consensus", or in mid-round for example "replica-1-of-2".
    """
    if not ensemble.replicas_differ:
        return "consensus"
    return f"replica-{ensemble.replicas.rank}-of-{ensemble.replicas.size}"
