"""Which tensors a run has, and what is done with them: averaging, parts, copies to go back to."""
