"""The learning rate found before the run, by ramps of rising rates. Begin with `find_lr.py`."""
