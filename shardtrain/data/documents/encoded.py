"""A document: the tokens of one row of a dataset, and a mask of the learned tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shardtrain.data.sources import BadRow
from shardtrain.data.tokenizers.open_tokenizer import Tokenizer


@dataclass(frozen=True)
class Document:
    """Tokens of one row, with BOS and EOS; 1-D int32.

    ``learned`` is a 1-D bool array of the same length: True for tokens that count in the loss as targets.
    None means all of them. ``notes`` are remarks about the row that ``data check`` counts.
    """

    tokens: npt.NDArray[np.int32]
    learned: npt.NDArray[np.bool_] | None = None
    notes: tuple[str, ...] = ()


class Encoder(Protocol):
    """Converts rows to documents, with a tokenizer, the format of rows, and their columns."""

    tokenizer: Tokenizer
    fingerprint: str
    """SHA-256 in hex of everything that determines the documents of a row."""

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> list[Document | BadRow]:
        """Return one document, or a BadRow with the reason, per row. Many rows at once are faster."""
        ...
