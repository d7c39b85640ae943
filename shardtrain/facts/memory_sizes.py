"""Sizes of what training keeps in memory: state tensors by optimizer."""

OPTIMIZER_STATES = {"AdamW": 2, "Adam": 2, "AdamW8bit": 2, "Muon": 1}
"""Tensors as large as a parameter that the optimizer of this name keeps for it, at least."""
