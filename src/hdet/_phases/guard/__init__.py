"""What is not finite is left out: gradients, and replicas."""
