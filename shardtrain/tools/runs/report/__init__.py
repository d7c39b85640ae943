"""Verb ``report``: summarize runs from their files as one self-contained page."""
