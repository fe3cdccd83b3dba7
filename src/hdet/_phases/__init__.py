"""What happens at the end of a round, one concern per file. `hdet._engine.assembly` has them in order."""
