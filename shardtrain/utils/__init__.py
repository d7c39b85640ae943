"""Helpers that do not depend on training: errors, units, logs, small files."""
