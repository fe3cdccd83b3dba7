"""Shows a run's records: as a page, as a live page, as pictures. Start at `commands.py`."""
