"""One run: its settings, its position, and the state that all phases share."""
