"""The lab: real training tasks to try hdet on before it meets your own. Needs `pip install 'hdet[lab]'`."""
