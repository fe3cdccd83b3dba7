"""The lab: real training tasks to try hdet on before using it on your own. Needs `pip install 'hdet[lab]'`."""
