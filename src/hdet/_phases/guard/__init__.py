"""The guard: leaves out gradients and replicas that are not finite."""
