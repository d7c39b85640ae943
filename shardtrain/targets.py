"""What a target may be besides a token; apart from the loss, so that data are prepared without torch."""

from __future__ import annotations

IGNORE = -100
"""Target of a token that carries no loss (PyTorch's and Hugging Face's convention)."""
