"""Checkpoints of a run: `save.py` and `load.py` are the ways in, `folder.py` is what lies on the disk."""
