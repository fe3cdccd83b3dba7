"""When a run has diverged, and what to go back to."""
