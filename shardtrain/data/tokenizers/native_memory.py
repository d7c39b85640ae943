"""Memory that a tokenizer library in Rust needs, checked before it is called.

The library aborts its process when an allocation fails. Nobody could then report that memory has run out.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardtrain.utils import limits
from shardtrain.utils.units import MIB, format_bytes

# Measured with tokenizers 0.22: 100 bytes per byte of source code, 290 of text in which each character is a token,
# and 15 per byte of a tokenizer.json.
_BYTES_PER_BYTE_OF_TEXT = 300
_BYTES_PER_BYTE_OF_FILE = 20
_BASE_BYTES = 16 * MIB


def suffices_for_texts(texts: Sequence[str]) -> bool:
    """True if the memory under the ulimits of this process suffices for tokenizing these texts in one call."""
    return limits.can_allocate(_for_texts(_size(texts)))


def require_for_texts(texts: Sequence[str]) -> None:
    """Check that memory suffices for tokenizing these texts in one call. Raises OutOfMemoryError."""
    size = _size(texts)
    limits.require_memory(_for_texts(size), f"tokenizing {format_bytes(size)} of text")


def require_for_file(num_bytes: int) -> None:
    """Check that memory suffices for opening a tokenizer's file of this size. Raises OutOfMemoryError."""
    need = _BASE_BYTES + _BYTES_PER_BYTE_OF_FILE * num_bytes
    limits.require_memory(need, f"opening a tokenizer of {format_bytes(num_bytes)}")


def _for_texts(num_bytes: int) -> int:
    return _BASE_BYTES + _BYTES_PER_BYTE_OF_TEXT * num_bytes


def _size(texts: Sequence[str]) -> int:
    """Return the size of texts in bytes. Most characters that are not ASCII take two or three bytes."""
    return sum(len(text) if text.isascii() else 3 * len(text) for text in texts)
