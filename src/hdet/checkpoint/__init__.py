"""Checkpoints of a run: `hdet.save` and `hdet.load` are the ways in, `folder.py` is what lies on the disk."""

from hdet.checkpoint.load import Checkpoint
from hdet.checkpoint.sharded import replica_key

__all__ = ["Checkpoint", "replica_key"]
