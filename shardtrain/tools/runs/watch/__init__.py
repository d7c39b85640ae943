"""Verb ``watch``: a live view of runs in a terminal. It only reads their files."""
