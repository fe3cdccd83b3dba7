"""One run: what its ensemble was given, where it is, and what all of its phases share."""
