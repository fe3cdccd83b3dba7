"""HDET in loops that belong to others: `lightning.py`, `transformers.py`, `accelerate.py`; `hosted.py` is their core.

Each needs its own package and is imported by name: `from hdet.integrations.lightning import HDETCallback`.
"""
