"""Detects that a run has diverged and returns to its best weights."""
