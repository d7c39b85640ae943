"""Pack a stream of documents into rows, with a cursor from which the next row can be created again."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np

from shardtrain.data.documents.encoded import Document
from shardtrain.data.feed import Cursor
from shardtrain.data.packing.fitted import pack
from shardtrain.data.packing.packed_rows import PackedSequences, Packing, Rows, fates, write_window
from shardtrain.data.packing.token_buffer import MemoryTokenBuffer

logger = logging.getLogger(__name__)

FRUITLESS_PASSES = 16
"""A reader ends after this number of passes without a row."""
BLOCK_DOCUMENTS = 128
"""Number of documents that a reader fits into rows together.

Never change it, because the order of the data depends on it.
"""
Place = tuple[int, int]
"""Identifies the next document of a reader: its part (epoch, or epoch and shard), and its number in this part."""
Documents = Iterator[tuple[Place, Document]]
"""Documents, each with the place at which reading resumes after the document."""


class Packer(Protocol):
    """Interface of an object that packs documents into rows.

    ``part`` is the epoch, or the epoch and shard, of the last document in the last row.
    """

    part: int

    @property
    def cursor(self) -> Cursor:
        """Start of the next row: the place of a document, and how much of it (or of its block) was returned."""
        ...

    def write(self, out: PackedSequences, slot: int) -> bool:
        """Fill a row. If no documents are left, write nothing and return False."""
        ...


class LostDocuments:
    """Counts for each reason the documents that a stream has truncated or skipped in this process.

    It logs a count whenever it reaches another power of two,
    because the final count is unknown until the end.
    """

    def __init__(self, dataset: str) -> None:
        self._dataset = dataset
        self._counts: Counter[str] = Counter()

    def add(self, counts: Mapping[str, int], level: int = logging.WARNING) -> None:
        for fate, count in counts.items():
            before = self._counts[fate]
            after = before + count
            self._counts[fate] = after
            # Log when the count reaches a power of two.
            if after.bit_length() > before.bit_length():
                logger.log(level, "dataset %s: %d documents so far %s", self._dataset, after, fate)


def packer(
    packing: Packing,
    documents: Documents,
    cursor: Cursor,
    vocab_size: int,
    parts_per_epoch: int,
    lost: LostDocuments,
) -> Packer:
    """Return the packer for documents, which start at ``cursor``.

    ``lost`` counts documents that are truncated or skipped because they are too long.
    """
    if packing.kind == "concat":
        return ConcatPacker(packing, documents, cursor)
    return FittedPacker(packing, documents, cursor, vocab_size, parts_per_epoch, lost)


class ConcatPacker:
    """Packs documents into windows of ``seq_len + 1`` tokens. Consecutive windows share one token."""

    def __init__(self, packing: Packing, documents: Documents, cursor: Cursor) -> None:
        self._packing = packing
        self._documents = documents
        self.part = cursor[0]
        self._documents_in_memory: deque[tuple[Place, Document]] = deque()
        # The place of the first document in memory, and how many of its tokens were already returned.
        self._begin: Place = (cursor[0], cursor[1])
        self._offset = cursor[2]

    @property
    def cursor(self) -> Cursor:
        """Start of the next row: the place of its first document, and the first unused token of this document."""
        return (*self._begin, self._offset)

    def write(self, out: PackedSequences, slot: int) -> bool:
        """Fill a row. The last row is padded."""
        # Take documents until there are enough tokens for a row.
        # A row needs at least two tokens for a target.
        wanted = self._packing.seq_len + 1
        num_tokens = sum(len(document.tokens) for _, document in self._documents_in_memory)
        length = num_tokens - self._offset
        while length < wanted and (next_document := next(self._documents, None)) is not None:
            self._documents_in_memory.append(next_document)
            length += len(next_document[1].tokens)
        length = min(length, wanted)
        if length < 2:
            return False

        # Collect the window: the rest of the first document, complete documents,
        # and the beginning of the last one.
        parts = []
        masks = []
        begins = []
        column = 0
        for index, (_, document) in enumerate(self._documents_in_memory):
            start = self._offset if index == 0 else 0
            stop = min(len(document.tokens), start + length - column)
            if start == stop:
                continue
            if column and start == 0:
                begins.append(column)
            parts.append(document.tokens[start:stop])
            if document.learned is None:
                masks.append(np.ones(stop - start, np.bool_))
            else:
                masks.append(document.learned[start:stop])
            column += stop - start
        # Without a mask, all tokens are learned.
        learned = None
        if any(document.learned is not None for _, document in self._documents_in_memory):
            learned = np.concatenate(masks)
        write_window(
            out,
            slot,
            tokens=np.concatenate(parts).astype(np.int64),
            learned=learned,
            begins=np.array(begins, np.int64) if self._packing.masked else None,
        )

        # The last token of this row is also the first token of the next row. Otherwise the target of the
        # last token would be lost. So drop a document only if the next row begins after it.
        self.part = self._documents_in_memory[-1][0][0]
        self._offset += length - 1
        while self._documents_in_memory:
            begin, document = self._documents_in_memory[0]
            if self._offset < len(document.tokens):
                break
            self._begin = begin
            self._offset -= len(document.tokens)
            self._documents_in_memory.popleft()
        return True


class FittedPacker:
    """Packs complete documents into rows, one block of documents at a time.

    A block contains documents of only one epoch.
    So the rows of an epoch do not depend on the number of epochs.
    """

    def __init__(
        self,
        packing: Packing,
        documents: Documents,
        cursor: Cursor,
        vocab_size: int,
        parts_per_epoch: int,
        lost: LostDocuments,
    ) -> None:
        self._packing = packing
        self._documents = documents
        self._vocab_size = vocab_size
        self._parts_per_epoch = parts_per_epoch
        self._lost = lost
        self.part = cursor[0]
        # the first document of the next block, if it has been read already
        self._ahead: tuple[Place, Document] | None = None
        self._block: Rows | None = None
        # The place of the block's first document, the place after its last one, and the number of its rows
        # that were already returned.
        self._begin: Place = (cursor[0], cursor[1])
        self._after = self._begin
        self._rows_returned = cursor[2]

    @property
    def cursor(self) -> Cursor:
        """The place of the block's first document, and an offset in rows."""
        return (*self._begin, self._rows_returned)

    def write(self, out: PackedSequences, slot: int) -> bool:
        """Fill a row from the current or the next block."""
        # Loop, because a block has no rows if all of its documents are too long and skipped.
        while self._block is None or self._rows_returned == self._block.num_rows:
            if self._block is not None:
                self._begin = self._after
                self._rows_returned = 0
                self._block = None
            block = self._next_block()
            if not block:
                return False
            self._after = block[-1][0]
            self._block = pack(
                MemoryTokenBuffer((document for _, document in block), self._vocab_size),
                self._packing,
            )
            self._lost.add(fates(self._block))
            if (
                not self._block.num_rows
                and self._after[0] > self.part + FRUITLESS_PASSES * self._parts_per_epoch
            ):
                text = "a reader found no document that fits in %d passes and ends (data.long_documents)"
                logger.warning(text, FRUITLESS_PASSES)
                self._documents = iter(())
                self._ahead = None

        # When a run resumes, the cursor may be inside the block. Its earlier rows are then skipped.
        self._block.write(self._rows_returned, out, slot)
        self._rows_returned += 1
        self.part = self._after[0]
        return True

    def _next_block(self) -> list[tuple[Place, Document]]:
        """Return up to 128 documents of one epoch. Empty at the end of the data."""
        block: list[tuple[Place, Document]] = []
        while len(block) < BLOCK_DOCUMENTS:
            next_document = self._ahead or next(self._documents, None)
            self._ahead = None
            if next_document is None:
                break
            # Keep the first document of the next epoch for the next block.
            if block and self._epoch(next_document) > self._epoch(block[0]):
                self._ahead = next_document
                break
            block.append(next_document)
        return block

    def _epoch(self, document: tuple[Place, Document]) -> int:
        return document[0][0] // self._parts_per_epoch
