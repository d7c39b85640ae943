"""Rows of whole documents: "first_fit" puts them where they fit, "padded" gives each a row.

Documents are fitted in order of falling length (Johnson 1973), block by block, so that a row depends on its block
alone. What is left of a row has no target.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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

    cut, dropped: documents that lost their end, or that were left out because they are too long.
    """

    def __init__(self, line: TokenBuffer, packing: Packing) -> None:
        self._line, self.packing = line, packing
        begins = line.document_starts()
        blocks: list[Pieces] = []
        rows_of_blocks: list[Tokens] = []
        num_rows = 0
        for first in range(0, line.num_documents, BLOCK_DOCUMENTS):
            last = min(first + BLOCK_DOCUMENTS, line.num_documents)
            stops = np.append(begins[first + 1 : last], begins[last] if last < len(begins) else line.num_tokens)
            pieces = pieces_of(np.asarray(begins[first:last]), stops.astype(np.int64), packing)
            rows = np.arange(len(pieces.starts))
            if packing.kind == "first_fit":
                rows = first_fit(pieces.stops - pieces.starts - 1, packing.seq_len)
            blocks.append(pieces)
            rows_of_blocks.append(rows + num_rows)
            num_rows += int(rows.max()) + 1 if len(rows) else 0
        rows = np.concatenate(rows_of_blocks) if rows_of_blocks else np.array([], np.int64)
        order = np.argsort(rows, kind="stable")
        self.num_rows = num_rows
        self._starts = np.concatenate([p.starts for p in blocks])[order] if blocks else rows
        self._stops = np.concatenate([p.stops for p in blocks])[order] if blocks else rows
        self.num_targets = int((self._stops - self._starts - 1).sum())
        self._ends = np.searchsorted(rows[order], np.arange(num_rows), side="right")
        self.cut, self.dropped = sum(p.cut for p in blocks), sum(p.dropped for p in blocks)

    def write(self, row: int, out: Sequences, slot: int) -> None:
        column, columns = 0, []
        first = int(self._ends[row - 1]) if row else 0
        for index in range(first, int(self._ends[row])):
            start, stop = int(self._starts[index]), int(self._stops[index])
            learned = self._line.learned(start, stop) if self._line.has_mask else None
            out.write(slot, column, self._line.tokens(start, stop), learned)
            column += stop - start - 1
            columns.append(column)
        out.number_documents(slot, np.array(columns, dtype=np.int64))
