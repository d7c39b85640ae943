"""Rows of a source to tokenized documents: columns, formats, policies for bad rows, and a cache of tokens."""
