"""The phases at the end of a round, one concern per file. `hdet._engine.assembly` lists them in order."""
