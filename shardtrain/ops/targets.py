"""Special values of targets and document numbers. Separate because data preparation does not import torch."""

IGNORE = -100
"""Target of a token without loss (PyTorch's and Hugging Face's convention)."""

FILLER_DOCUMENT = 2**31 - 1
"""Document number of the padding after the last document of a row."""
