"""Compatibility with other training systems: their configuration files, commands and weight files.

The rest of the package works without this folder.
"""
