"""The engine behind an `Ensemble`: it runs the rounds and calls the phases at their ends."""
