"""The commands of `hdet`, by group; `cli.py` assembles them."""
