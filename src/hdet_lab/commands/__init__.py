"""What each command of `hdet` does with its arguments, by group; `cli.py` puts them together."""
