"""What can be explored: one scalar, where it lives, its coordinate and bounds."""
