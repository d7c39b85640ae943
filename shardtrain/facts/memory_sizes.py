"""Sizes of what training keeps in memory: bytes of an element by dtype, and state tensors by optimizer."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}

OPTIMIZER_STATES = {"AdamW": 2, "Adam": 2, "AdamW8bit": 2, "Muon": 1}
"""Tensors as large as a parameter that the optimizer of this name keeps for it, at least."""
