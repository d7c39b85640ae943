"""Built-in tokenizers, which are selected by name instead of by path."""

from __future__ import annotations

from pathlib import Path

BYTES = "bytes"
"""Tokenizer with one token per byte. It has no file."""
PYTHON_BPE = "python_bpe"
"""Byte-level BPE with 2,048 ids, trained on Python 3.11's standard library."""
_FOLDER = Path(__file__).parents[1] / "data" / "tokenizers"


def is_built_in(name: str) -> bool:
    """True if ``name`` is a built-in tokenizer, not a path."""
    return name in (BYTES, PYTHON_BPE)


def tokenizer_folder(name: str) -> Path:
    """Return the folder of a tokenizer name or path. The folder of "bytes" does not exist."""
    if is_built_in(name):
        return _FOLDER / name
    return Path(name).expanduser()
