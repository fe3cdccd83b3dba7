"""The tensors of a run: which they are, averaging, sharded parts, copies to restore."""
