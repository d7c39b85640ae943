"""What a target may be besides a token, and a document number besides a count; data are prepared without torch."""

IGNORE = -100
"""Target of a token that carries no loss (PyTorch's and Hugging Face's convention)."""

FILLER_DOCUMENT = 2**31 - 1
"""Number, among the documents of a row, of what follows the last one: no token of any text."""
