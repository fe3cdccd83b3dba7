"""A run's records, to be looked at: a page, the same page live, pictures. Start at `commands.py`."""
