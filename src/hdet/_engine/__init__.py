"""What runs behind an `Ensemble`: where the run is, and the phases that a round ends with."""
