"""A probe: the same data for all replicas, and the loss of their weights on it."""
