"""Tokenizers that come with the package and are named by a word, as presets are."""

from __future__ import annotations

from pathlib import Path

BYTES = "bytes"
"""A token per byte; it has no file."""
PYTHON_BPE = "python_bpe"
"""A byte-level BPE of 2,048 ids, made from the Python 3.11 standard library by ``shardtrain data tokenizer train``."""
_FOLDER = Path(__file__).parents[1] / "data" / "tokenizers"


def is_built_in(name: str) -> bool:
    """Whether this is the name of a tokenizer of the package, and not a path."""
    return name in (BYTES, PYTHON_BPE)


def tokenizer_folder(name: str) -> Path:
    """The folder that ``model.hf_assets_path`` names; for "bytes", which has none, a path that does not exist."""
    return _FOLDER / name if is_built_in(name) else Path(name).expanduser()
