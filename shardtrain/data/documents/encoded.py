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
    """The tokens of one row, including BOS and EOS.

    Attributes:
        tokens: the tokens, 1-D int32.
        learned: 1-D bool array of the same length. True for tokens that count in the loss as targets. None
            means that all tokens count.
        notes: remarks about the row, which ``data check`` counts.
    """

    tokens: npt.NDArray[np.int32]
    learned: npt.NDArray[np.bool_] | None = None
    notes: tuple[str, ...] = ()


class Encoder(Protocol):
    """Interface of a converter from rows to documents, for one format of rows."""

    tokenizer: Tokenizer
    fingerprint: str
    """SHA-256 in hex of everything that determines how a row is converted."""

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> list[Document | BadRow]:
        """Return for each row one document, or a BadRow with the reason. Faster for many rows at once."""
        ...
