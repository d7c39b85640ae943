"""All documents of a dataset, concatenated, in memory or in files. Any range of tokens can be read."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shardtrain.data.documents.encoded import Document
from shardtrain.data.documents.growth import ROW_BYTES, Growth

Tokens = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class TokenBuffer(Protocol):
    """Interface of concatenated documents. Tokens and documents are numbered from 0 over the entire dataset.

    Attributes:
        num_tokens, num_documents: totals over the dataset.
        has_mask: True if some tokens are not learned.
    """

    num_tokens: int
    num_documents: int
    has_mask: bool

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of tokens, masks and document boundaries."""
        ...

    def tokens(self, start: int, stop: int) -> Tokens:
        """Return the tokens start..stop-1, int64."""
        ...

    def learned(self, start: int, stop: int) -> Mask:
        """Return a mask of the tokens start..stop-1 that count in the loss as targets."""
        ...

    def starts(self, start: int, stop: int) -> Tokens:
        """Return the token numbers in start..stop-1 at which a document starts, ascending."""
        ...

    def document_starts(self) -> npt.NDArray[np.int64]:
        """Return the token number at which each document starts, ascending.

        It has 8 bytes per document, and may be a memory-mapped file.
        """
        ...

    def check_unchanged(self) -> None:
        """Raise ConfigError with the file's name if a file was changed, moved or removed after it was opened."""
        ...


class MemoryTokenBuffer:
    """A token buffer in memory, with 2 bytes per token if the vocabulary permits, else 4."""

    def __init__(
        self, documents: Iterable[Document], vocab_size: int, growth: Growth | None = None
    ) -> None:
        """Read all documents. ``growth`` limits the memory."""
        dtype = np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<i4")
        # Collect tokens in a bytearray, which grows in place. Concatenating one array per document would need
        # twice the memory.
        tokens = bytearray()
        lengths = array("q")
        # Do not store a mask until a document has one, because most datasets have none.
        mask = bytearray()
        for document in documents:
            size = len(document.tokens)
            if document.learned is not None or mask:
                if not mask:
                    # all tokens of earlier documents are learned
                    mask += b"\1" * sum(lengths)
                learned = np.ones(size, np.bool_) if document.learned is None else document.learned
                mask += learned.tobytes()
            tokens += document.tokens.astype(dtype).tobytes()
            lengths.append(size)
            if growth is not None:
                mask_bytes = 0 if document.learned is None else size
                growth.keep(size * dtype.itemsize + ROW_BYTES + mask_bytes)

        self._tokens = np.frombuffer(tokens, dtype)
        # a document starts where the previous one ends
        sizes = np.array(lengths, np.int64)
        self._starts = np.cumsum(sizes) - sizes
        self._mask: Mask | None = np.frombuffer(mask, np.bool_) if mask else None
        self._count()

    def arrays(self) -> dict[str, npt.NDArray[Any] | None]:
        """Return the contents, for ``from_arrays`` on another rank."""
        return {"tokens": self._tokens, "starts": self._starts, "mask": self._mask}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any]) -> MemoryTokenBuffer:
        """Return a buffer with the contents that ``arrays`` returned."""
        buffer = cls.__new__(cls)
        buffer._tokens = arrays["tokens"]
        buffer._starts = arrays["starts"]
        buffer._mask = arrays["mask"]
        buffer._count()
        return buffer

    def _count(self) -> None:
        self.num_tokens = len(self._tokens)
        self.num_documents = len(self._starts)
        self.has_mask = self._mask is not None

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(self._tokens.dtype.str.encode())
        for part in (self._tokens, self._starts, self._mask):
            if part is not None:
                digest.update(hashlib.sha256(np.ascontiguousarray(part).data).digest())
        return digest.hexdigest()

    def tokens(self, start: int, stop: int) -> Tokens:
        return self._tokens[start:stop].astype(np.int64)

    def learned(self, start: int, stop: int) -> Mask:
        if self._mask is None:
            return np.ones(stop - start, dtype=np.bool_)
        return self._mask[start:stop]

    def starts(self, start: int, stop: int) -> Tokens:
        first, last = np.searchsorted(self._starts, (start, stop))
        return self._starts[first:last]

    def document_starts(self) -> npt.NDArray[np.int64]:
        return self._starts

    def check_unchanged(self) -> None:
        """No-op: data in memory do not change."""
