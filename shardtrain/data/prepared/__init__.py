"""Shards of tokens on disk: their index, their reader and their writer."""
