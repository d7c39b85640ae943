"""Rows of whole documents: "first_fit" puts them where they fit, "padded" gives each a row.

Documents are fitted in order of falling length (Johnson 1973), block by block, so that a row depends on its block
alone. What is left of a row has no target.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardtrain.data.first_fit import first_fit
from shardtrain.data.packing import ConcatRows, Packing, Rows, Sequences
from shardtrain.data.token_buffer import TokenBuffer, Tokens

BLOCK_DOCUMENTS = 8192
"""Documents that are fitted together; rows of a prepared dataset hang on it, so it never changes."""


def pack(line: TokenBuffer, packing: Packing) -> Rows:
    """The rows of a line of documents."""
    return ConcatRows(line, packing) if packing.kind == "concat" else FittedRows(line, packing)


@dataclass(frozen=True)
class Pieces:
    """Parts of documents that go into a row whole: token numbers where they start and stop, with their last target.

    cut, dropped: documents that lost their end, or that were left out because they are too long.
    """

    starts: Tokens
    stops: Tokens
    cut: int
    dropped: int


def pieces_of(document_starts: Tokens, document_stops: Tokens, packing: Packing) -> Pieces:
    """Cut documents to at most ``seq_len`` targets each; a document of one token has no target and gives none."""
    T = packing.seq_len
    targets = document_stops - document_starts - 1
    is_long = targets > T
    counts = np.where(targets > 0, 1, 0)
    if packing.long_documents == "split":
        counts = -(-np.maximum(targets, 0) // T)
    elif packing.long_documents == "drop":
        counts = np.where(is_long, 0, counts)
    owners = np.repeat(np.arange(len(targets)), counts)
    numbers = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = document_starts[owners] + numbers * T
    stops = np.minimum(starts + T + 1, document_stops[owners])
    num_long = int(is_long.sum())
    return Pieces(
        starts,
        stops,
        cut=num_long if packing.long_documents == "cut" else 0,
        dropped=num_long if packing.long_documents == "drop" else 0,
    )


class FittedRows:
    """Whole documents, several or one to a row; what they do not fill has no targets.

    Held are two bytes per piece of a document, and nothing where each has a row: where pieces begin and end is worked
    out again, block by block, from where documents begin.

    cut, dropped: documents that lost their end, or that were left out because they are too long.
    """

    def __init__(self, line: TokenBuffer, packing: Packing) -> None:
        self._line, self.packing = line, packing
        self.num_targets = self.cut = self.dropped = 0
        self._orders: list[npt.NDArray[np.uint16 | np.uint32]] = []
        """Of each block the pieces in the order of their rows; empty where each has a row of its own."""
        self._ends: list[npt.NDArray[np.uint16 | np.uint32]] = []
        """Of each block the number of pieces up to the end of each row."""
        rows_up_to = [0]
        for block in range(-(-line.num_documents // BLOCK_DOCUMENTS)):
            pieces = self._pieces(block)
            lengths = pieces.stops - pieces.starts - 1
            self.num_targets += int(lengths.sum())
            self.cut += pieces.cut
            self.dropped += pieces.dropped
            num_rows = len(lengths)
            if packing.kind == "first_fit":
                rows = first_fit(lengths, packing.seq_len)
                num_rows = int(rows.max()) + 1 if len(rows) else 0
                small = np.uint16 if len(rows) < 2**16 else np.uint32  # a long document is many pieces
                self._orders.append(np.argsort(rows, kind="stable").astype(small))
                self._ends.append(np.cumsum(np.bincount(rows, minlength=num_rows)).astype(small))
            rows_up_to.append(rows_up_to[-1] + num_rows)
        self._rows_up_to = np.array(rows_up_to, np.int64)
        self.num_rows = rows_up_to[-1]
        self._last: tuple[int, Pieces] | None = None

    def write(self, row: int, out: Sequences, slot: int) -> None:
        block = int(np.searchsorted(self._rows_up_to, row, side="right")) - 1
        if self._last is None or self._last[0] != block:
            self._last = block, self._pieces(block)
        pieces, row = self._last[1], row - int(self._rows_up_to[block])
        indices: Iterable[int] = [row]
        if self._orders:
            first = int(self._ends[block][row - 1]) if row else 0
            indices = self._orders[block][first : int(self._ends[block][row])].tolist()
        column, columns = 0, []
        for index in indices:
            start, stop = int(pieces.starts[index]), int(pieces.stops[index])
            learned = self._line.learned(start, stop) if self._line.has_mask else None
            out.write(slot, column, self._line.tokens(start, stop), learned)
            column += stop - start - 1
            columns.append(column)
        out.number_documents(slot, np.array(columns, dtype=np.int64))

    def _pieces(self, block: int) -> Pieces:
        """The pieces of the documents of a block."""
        begins = self._line.document_starts()
        first = block * BLOCK_DOCUMENTS
        last = min(first + BLOCK_DOCUMENTS, self._line.num_documents)
        stops = np.append(begins[first + 1 : last], begins[last] if last < len(begins) else self._line.num_tokens)
        return pieces_of(np.asarray(begins[first:last]), stops.astype(np.int64), self.packing)
