"""Optimizers by their name in ``optimizer.name``.

To add one, write ``optim/NAME.py``, its name in lower case, and add its row to ``OPTIMIZERS``. The file has the same
functions as a user's optimizer file: see ``docs/extend.md``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerFacts:
    """Facts about an optimizer that the package needs without importing it."""

    state_tensors: int
    """Minimum number of state tensors with the size of the parameter, for each parameter."""
    state_bytes: int | None = None
    """Bytes of an element of these tensors. None if ``optimizer.state_dtype`` or ``training.dtype`` decides."""
    updates_separately: bool = True
    """True if a parameter can be updated before the gradients of the others are known."""


OPTIMIZERS = {
    "AdamW": OptimizerFacts(state_tensors=2),
    "Adam": OptimizerFacts(state_tensors=2),
    "AdamW8bit": OptimizerFacts(state_tensors=2, state_bytes=1),
    "Muon": OptimizerFacts(state_tensors=1, updates_separately=False),
}

PYTORCH_ADAMS = ("AdamW", "Adam")
"""Optimizers of PyTorch. ``optimizer.state_dtype`` and ``optimizer.bf16_stochastic_round`` are for these only."""

STATE_BLOCK = 256
"""Elements of an 8-bit state that share a scale, along the last dimension of a parameter. As in torchao."""

SMALLEST_8BIT_NUMEL = 4096
"""Minimum number of elements of a parameter for AdamW8bit to keep its state in 8 bits. As in torchao and
bitsandbytes.
"""
