"""The tail average of a run: its weights at the ends of its last rounds."""
