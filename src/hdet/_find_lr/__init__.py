"""The search for a learning rate before the first step."""
