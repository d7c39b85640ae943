"""Platforms that start ranks: one file per platform, and the files that connect to it."""
