"""Compute the rows of a loader independently, from the documents of its sources and the rule of the packing.

The packing code and its buffers are not used. If they have a wrong border between documents, both layouts
differ. Only the choice of the documents that share a row comes from ``data.packing.fitted``,
because it changes no border.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardtrain.data.batch import Batch
from shardtrain.data.documents.encoded import Document, Encoder
from shardtrain.data.loader import SOURCE_BITS, DataLoader
from shardtrain.data.packing import fitted
from shardtrain.data.packing.packed_rows import Packing
from shardtrain.data.prepared.shards import ShardTokenBuffer
from shardtrain.data.sources import BadRow
from shardtrain.data.streaming import stream_pack
from shardtrain.data.streaming.stream import StreamFeed
from shardtrain.ops.targets import IGNORE

Integers = npt.NDArray[np.int64]

_LENGTHS = (0.3, 0.15, 1.6, 0.25, 0.1, 0.4)
"""Length of a shortened document as a fraction of a row. One fraction exceeds a row."""


class ShortDocuments:
    """An encoder whose documents are shortened, so a short row has several of them.

    A document keeps a window of its tokens that begins shortly before its first learned token.
    """

    def __init__(self, encoder: Encoder, seq_len: int) -> None:
        self.tokenizer = encoder.tokenizer
        self.fingerprint = f"{encoder.fingerprint}, shortened for {seq_len}"
        self._encoder = encoder
        self._seq_len = seq_len

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> list[Document | BadRow]:
        """Return one shortened document, or a BadRow with the reason, per row."""
        documents: list[Document | BadRow] = []
        for document in self._encoder.encode(rows):
            if isinstance(document, Document):
                document = self._shortened(document)
            documents.append(document)
        return documents

    def _shortened(self, document: Document) -> Document:
        # The fraction is a function of the content, because a document has no number here.
        index = int(document.tokens.sum()) % len(_LENGTHS)
        fraction = _LENGTHS[index]
        # A single token has no target.
        length = max(2, int(fraction * self._seq_len))
        start = 0
        learned = document.learned
        # Without a learned token, the loss of the document would be empty and would not be compared.
        if learned is not None and learned.any():
            first_learned = int(learned.argmax())
            start = max(0, first_learned - length // 2)
        window = slice(start, start + length)
        if learned is not None:
            learned = learned[window]
        return replace(document, tokens=document.tokens[window], learned=learned)


class Line(Protocol):
    """Concatenated documents."""

    num_tokens: int
    has_mask: bool

    def document_starts(self) -> Integers: ...

    def tokens(self, start: int, stop: int) -> Integers: ...

    def learned(self, start: int, stop: int) -> npt.NDArray[np.bool_]: ...


class DocumentLine:
    """Concatenation of documents in memory."""

    def __init__(self, documents: Sequence[Document]) -> None:
        lengths = [len(document.tokens) for document in documents]
        masks = []
        for document in documents:
            mask = document.learned
            if mask is None:
                mask = np.ones(len(document.tokens), np.bool_)
            masks.append(mask)
        self.num_tokens = sum(lengths)
        self.has_mask = any(document.learned is not None for document in documents)
        # Each document starts where the previous document ends. The last end is not a start.
        ends = itertools.accumulate(lengths)
        self._starts = np.array([0, *ends], np.int64)[:-1]
        self._tokens = np.concatenate([document.tokens for document in documents])
        self._learned = np.concatenate(masks)

    def document_starts(self) -> Integers:
        return self._starts

    def tokens(self, start: int, stop: int) -> Integers:
        return self._tokens[start:stop].astype(np.int64)

    def learned(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        return self._learned[start:stop]


@dataclass(frozen=True)
class RowPiece:
    """The part of one document in a row: inputs, and their targets within the same document."""

    inputs: Integers
    targets: Integers


def _piece(line: Line, start: int, stop: int, has_target_after: bool) -> RowPiece:
    """Return the piece of the tokens start..stop-1. With ``has_target_after``, the last token is only a target."""
    tokens = line.tokens(start, stop)
    # The target of a token is the next token, if that is learned.
    is_learned = line.learned(start, stop)[1:]
    targets = np.where(is_learned, tokens[1:], IGNORE)
    if has_target_after:
        return RowPiece(tokens[:-1], targets)
    return RowPiece(tokens, np.append(targets, IGNORE))


def concat_row(line: Line, row: int, seq_len: int) -> list[RowPiece]:
    """Return the pieces of a row of "concat": the tokens from ``row * seq_len``, and one more as a target."""
    starts = line.document_starts()
    start = row * seq_len
    stop = min(start + seq_len + 1, line.num_tokens)
    pieces = []
    # ``document`` is the first document that starts after ``start``, so its start ends the current piece.
    document = int(np.searchsorted(starts, start, side="right"))
    while start < stop:
        end = line.num_tokens
        if document < len(starts):
            end = int(starts[document])
        document += 1
        # Skip empty documents.
        if end == start:
            continue
        # The last token of a row is only a target. It is the first input of the next row.
        piece_stop = min(end, stop)
        is_last = piece_stop == stop
        pieces.append(_piece(line, start, piece_stop, has_target_after=is_last))
        start = piece_stop
    return pieces


def fitted_rows(line: Line, first: int, last: int, packing: Packing) -> list[list[RowPiece]]:
    """Return the rows of a block of documents that are kept complete, ``first`` to ``last - 1``."""
    starts = line.document_starts()
    T = packing.seq_len
    pieces = []
    for document in range(first, last):
        begin = int(starts[document])
        end = line.num_tokens
        if document + 1 < len(starts):
            end = int(starts[document + 1])
        num_targets = end - begin - 1
        if num_targets > T and packing.long_documents == "drop":
            continue
        if num_targets > T and packing.long_documents == "cut":
            end = begin + T + 1
            num_targets = T
            # A document whose targets are all masked teaches nothing after the cut, so it gets no row.
            if line.has_mask and not line.learned(begin + 1, end).any():
                continue
        # Pieces share one token at their border: the last target of a piece is the first input of the next.
        for at in range(0, max(0, num_targets), T):
            stop = min(begin + at + T + 1, end)
            pieces.append(_piece(line, begin + at, stop, has_target_after=True))
    if packing.kind == "padded":
        return [[piece] for piece in pieces]
    # The algorithms of bin packing are not under test here, so they are those of the loader.
    fit = fitted.best_fit
    if packing.kind == "first_fit":
        fit = fitted.first_fit
    lengths = np.array([len(piece.inputs) for piece in pieces], np.int64)
    row_of_piece = fit(lengths, T).tolist()
    num_rows = max(row_of_piece, default=-1) + 1
    rows: list[list[RowPiece]] = [[] for _ in range(num_rows)]
    for piece, row in zip(pieces, row_of_piece, strict=True):
        rows[row].append(piece)
    return rows


class _IndexedRows:
    """Rows of a line of documents, by number."""

    def __init__(self, line: Line, packing: Packing) -> None:
        self._line = line
        self._packing = packing
        self._rows: list[list[RowPiece]] = []
        self._num_fitted = 0

    def row(self, number: int) -> list[RowPiece]:
        if self._packing.kind == "concat":
            return concat_row(self._line, number, self._packing.seq_len)
        # Documents are fitted in blocks, so the rows of a block do not depend on later documents.
        num_documents = len(self._line.document_starts())
        while len(self._rows) <= number:
            last = min(self._num_fitted + fitted.BLOCK_DOCUMENTS, num_documents)
            self._rows += fitted_rows(self._line, self._num_fitted, last, self._packing)
            self._num_fitted = last
        return self._rows[number]


class _StreamedRows:
    """Rows of a feed that is tokenized during training, in the order of each virtual reader."""

    def __init__(self, feed: StreamFeed) -> None:
        self._feed = feed
        self._readers: dict[int, _ReaderRows] = {}

    def row(self, number: int) -> list[RowPiece]:
        # The readers take turns: row number k of the feed is a row of reader k modulo the number of readers.
        reader = number % self._feed.num_readers
        number_of_reader = number // self._feed.num_readers
        if reader not in self._readers:
            self._readers[reader] = _ReaderRows(self._feed, reader)
        return self._readers[reader].row(number_of_reader)


class _ReaderRows:
    """Rows of one virtual reader."""

    def __init__(self, feed: StreamFeed, reader: int) -> None:
        self._packing = feed.packing
        self._per_epoch = feed.walk(reader).parts_per_epoch
        self._documents = _documents_of(feed, reader)
        self._read: list[Document] = []
        self._rows: list[list[RowPiece]] = []
        self._next: tuple[int, Document] | None = next(self._documents, None)

    def row(self, number: int) -> list[RowPiece]:
        T = self._packing.seq_len
        if self._packing.kind == "concat":
            # Rows are consecutive tokens of all documents, so keep every document from the start.
            needed = (number + 1) * T + 1
            while self._next and sum(len(read.tokens) for read in self._read) < needed:
                self._read.append(self._next[1])
                self._next = next(self._documents, None)
            return concat_row(DocumentLine(self._read), number, T)
        while len(self._rows) <= number:
            block = self._next_block()
            self._rows += fitted_rows(DocumentLine(block), 0, len(block), self._packing)
        return self._rows[number]

    def _next_block(self) -> list[Document]:
        """Return the next documents of one epoch that are fitted together."""
        block: list[Document] = []
        assert self._next is not None, "a row follows the last document"
        epoch = self._next[0] // self._per_epoch
        while self._next and len(block) < stream_pack.BLOCK_DOCUMENTS:
            part, document = self._next
            if part // self._per_epoch != epoch:
                break
            block.append(document)
            self._next = next(self._documents, None)
        return block


def _documents_of(feed: StreamFeed, reader: int) -> Iterator[tuple[int, Document]]:
    """Yield the documents of a virtual reader, each encoded separately, with its epoch or shard."""
    for (part, _), row in feed.walk(reader).rows((0, 0)):
        # A bad row has no document.
        if isinstance(row, BadRow):
            continue
        (document,) = feed.encoder.encode([row])
        if isinstance(document, Document):
            yield part, document


class ExpectedRows:
    """The rows of a loader, laid out independently.

    Args:
        loader: The loader of one process.
        read: Documents of each source that was read into memory, in the order in which sources are opened.
    """

    def __init__(self, loader: DataLoader, read: Sequence[Sequence[Document]]) -> None:
        self._pad_id = loader.pad_id
        self._sources: list[_IndexedRows | _StreamedRows] = []
        in_memory = iter(read)
        for feed in loader._opened.feeds:
            packing = loader._opened.packing
            if isinstance(feed, StreamFeed):
                self._sources.append(_StreamedRows(feed))
                continue
            indexed_feed: Any = feed
            line: Line = indexed_feed._tokens
            # Shards store the documents. Other sources were read into memory, in this order.
            if not isinstance(line, ShardTokenBuffer):
                line = DocumentLine(next(in_memory))
            packing_of_rows = indexed_feed.rows.packing or packing
            self._sources.append(_IndexedRows(line, packing_of_rows))

    def batch(self, packed: Batch) -> Batch:
        """Return the expected batch for the samples of a packed batch. Padding is a separate document."""
        shape = packed.tokens_BT.shape
        tokens_BT = torch.full(shape, self._pad_id)
        targets_BT = torch.full(shape, IGNORE)
        positions_BT = torch.arange(shape[1]).repeat(shape[0], 1)
        documents_BT = torch.zeros(shape, dtype=torch.int64)
        lengths_B = torch.zeros(shape[0], dtype=torch.int64)
        for slot, sample in enumerate(packed.sample_ids_B.tolist()):
            # Rows without a sample fill up the last batch. They stay padding.
            if sample < 0:
                continue
            # A sample id contains the number of its source and the number of its row.
            source = sample >> SOURCE_BITS
            number = sample % (1 << SOURCE_BITS)
            column = 0
            pieces = self._sources[source].row(number)
            for index, piece in enumerate(pieces):
                stop = column + len(piece.inputs)
                tokens_BT[slot, column:stop] = torch.from_numpy(piece.inputs)
                targets_BT[slot, column:stop] = torch.from_numpy(piece.targets)
                positions_BT[slot, column:stop] = torch.arange(stop - column)
                documents_BT[slot, column:stop] = index
                column = stop
            # The rest of the row is padding, with its own positions and document number.
            positions_BT[slot, column:] = torch.arange(shape[1] - column)
            documents_BT[slot, column:] = len(pieces)
            lengths_B[slot] = column
        return Batch(
            tokens_BT, targets_BT, positions_BT, packed.sample_ids_B, documents_BT, lengths_B
        )


def first_difference(packed: Batch, expected: Batch) -> str:
    """Describe the first difference of the packed rows from the expected rows, or return ""."""
    for row, sample in enumerate(packed.sample_ids_B.tolist()):
        # Columns after this length are padding, which has no meaning.
        length = 0
        if expected.lengths_B is not None:
            length = int(expected.lengths_B[row])
        where = f"row {sample % (1 << SOURCE_BITS)} of the data"
        mine = _borders(packed.documents_BT, row, length)
        theirs = _borders(expected.documents_BT, row, length)
        # Check borders first: a wrong border also changes positions and targets.
        if mine != theirs:
            return f"{where}: documents start at columns {mine} instead of {theirs}"
        columns = {
            "token": (packed.tokens_BT, expected.tokens_BT),
            "position": (packed.positions_BT, expected.positions_BT),
            "target": (packed.targets_BT, expected.targets_BT),
        }
        for name, (of_packed, of_expected) in columns.items():
            is_unequal = of_packed[row, :length] != of_expected[row, :length]
            unequal = is_unequal.nonzero()
            if len(unequal):
                column = int(unequal[0])
                actual = _value(int(of_packed[row, column]))
                correct = _value(int(of_expected[row, column]))
                return f"{where}: the {name} at column {column} is {actual} instead of {correct}"
    return ""


def _borders(documents_BT: Tensor | None, row: int, length: int) -> list[int]:
    """Return the columns at which the documents of a row start."""
    if documents_BT is None or not length:
        return []
    numbers_T = documents_BT[row, :length]
    is_new = numbers_T[1:] != numbers_T[:-1]
    changes = is_new.nonzero().flatten() + 1
    return [0, *changes.tolist()]


def _value(number: int) -> str:
    return "none" if number == IGNORE else str(number)


def num_shared_rows(batch: Batch) -> int:
    """Return the number of rows in which at least two documents have a target."""
    assert batch.documents_BT is not None
    count = 0
    for row in range(batch.tokens_BT.shape[0]):
        has_target_T = batch.targets_BT[row] != IGNORE
        if len(batch.documents_BT[row, has_target_T].unique()) > 1:
            count += 1
    return count
