"""Checkpoints of a run: `hdet.save` and `hdet.load` are the API, `folder.py` the format on disk."""

from hdet.checkpoint.load import Checkpoint
from hdet.checkpoint.sharded import replica_key

__all__ = ["Checkpoint", "replica_key"]
