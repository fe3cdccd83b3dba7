"""What must be the same on all replicas before the first step."""
