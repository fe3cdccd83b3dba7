"""One record per round: as an object, a line of JSON, on the terminal, in trackers; and schedules made of them."""
