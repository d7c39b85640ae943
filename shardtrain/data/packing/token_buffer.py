"""All documents of a dataset end to end: a line of tokens with any part of it at hand, in memory or in mapped files."""

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
    """Documents end to end. Token and document numbers count from 0 over the whole dataset.

    num_tokens, num_documents: of the whole line.
    has_mask: whether some token is not to be learned.
    """

    num_tokens: int
    num_documents: int
    has_mask: bool

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hex of tokens, masks and document boundaries."""
        ...

    def tokens(self, start: int, stop: int) -> Tokens:
        """Tokens start..stop-1, int64."""
        ...

    def learned(self, start: int, stop: int) -> Mask:
        """Whether each of these tokens counts in the loss as a target."""
        ...

    def starts(self, start: int, stop: int) -> Tokens:
        """Token numbers in start..stop-1 at which a document begins, ascending."""
        ...

    def document_starts(self) -> npt.NDArray[np.int64]:
        """Token number at which each document begins, ascending; 8 bytes a document, may be a mapped file."""
        ...

    def check_unchanged(self) -> None:
        """Raise ConfigError naming a file below the line that was changed, moved or removed since it was opened."""
        ...


class MemoryTokenBuffer:
    """A line in memory; tokens in 2 bytes where the vocabulary allows it, else in 4."""

    def __init__(self, documents: Iterable[Document], vocab_size: int, growth: Growth | None = None) -> None:
        """``growth`` bounds what is kept."""
        dtype = np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<i4")
        # Do not np.concatenate an array per document: this would need twice the memory. A bytearray grows in place.
        tokens = bytearray()
        lengths = array("q")
        mask = bytearray()  # empty until a document has a mask: a dataset of texts needs none
        for document in documents:
            size = len(document.tokens)
            if document.learned is not None or mask:
                mask += b"\1" * (sum(lengths) if not mask else 0)
                mask += (np.ones(size, np.bool_) if document.learned is None else document.learned).tobytes()
            tokens += document.tokens.astype(dtype).tobytes()
            lengths.append(size)
            if growth is not None:
                growth.keep(size * dtype.itemsize + ROW_BYTES + (0 if document.learned is None else size))

        self._tokens = np.frombuffer(tokens, dtype)
        # A document begins where the one before it ends.
        sizes = np.array(lengths, np.int64)
        self._starts = np.cumsum(sizes) - sizes
        self._mask: Mask | None = np.frombuffer(mask, np.bool_) if mask else None
        self._count()

    def arrays(self) -> dict[str, npt.NDArray[Any] | None]:
        """All that it holds, for ``from_arrays`` on another rank."""
        return {"tokens": self._tokens, "starts": self._starts, "mask": self._mask}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any]) -> MemoryTokenBuffer:
        """The buffer that gave these ``arrays``."""
        made = cls.__new__(cls)
        made._tokens = arrays["tokens"]
        made._starts = arrays["starts"]
        made._mask = arrays["mask"]
        made._count()
        return made

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
        return np.ones(stop - start, dtype=np.bool_) if self._mask is None else self._mask[start:stop]

    def starts(self, start: int, stop: int) -> Tokens:
        first, last = np.searchsorted(self._starts, (start, stop))
        return self._starts[first:last]

    def document_starts(self) -> npt.NDArray[np.int64]:
        return self._starts

    def check_unchanged(self) -> None:
        """What is in memory stays as it is."""
