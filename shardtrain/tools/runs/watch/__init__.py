"""The verb ``watch``: a live view of runs in a terminal, from their files alone."""
