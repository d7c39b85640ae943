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
"""Number of passes without a row after which a reader ends."""
BLOCK_DOCUMENTS = 128
"""Number of documents that a reader fits into rows together.

Part of the order of the data, so it must never change.
"""

Place = tuple[int, int]
"""The next document of a reader: its epoch or shard, and its number there."""

Documents = Iterator[tuple[Place, Document]]
"""Documents, each with the place at which reading resumes after it."""


class Packer(Protocol):
    """Packs documents into rows.

    ``part`` is the epoch, or the epoch and shard, of the last document in the last row.
    """

    part: int

    @property
    def cursor(self) -> Cursor:
        """The place of the document with which the next row begins, and the part of it (or of its block)
        that was already returned."""
        ...

    def write(self, out: PackedSequences, slot: int) -> bool:
        """Fill a row. Returns False, without writing, if no documents are left."""
        ...


class LostDocuments:
    """Counts documents that a stream has truncated or skipped in this process, by reason.

    Logs a count when it passes a power of two, because the final count is unknown until the stream ends.
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
    """Return the packer for documents from ``cursor`` on.

    ``lost`` counts documents that are cut or do not fit.
    """
    if packing.kind == "concat":
        return ConcatPacker(packing, documents, cursor)
    return FittedPacker(packing, documents, cursor, vocab_size, parts_per_epoch, lost)


class ConcatPacker:
    """Windows of ``seq_len + 1`` tokens. The last token of a window is the first of the next."""

    def __init__(self, packing: Packing, documents: Documents, cursor: Cursor) -> None:
        self._packing = packing
        self._documents = documents
        self.part = cursor[0]
        self._documents_in_memory: deque[tuple[Place, Document]] = deque()
        # place of the first document in memory, and the number of its tokens that were already returned
        self._begin: Place = (cursor[0], cursor[1])
        self._offset = cursor[2]

    @property
    def cursor(self) -> Cursor:
        """Place of the first document, and an offset in tokens."""
        return (*self._begin, self._offset)

    def write(self, out: PackedSequences, slot: int) -> bool:
        """Fill a row. Pads the last row."""
        # take documents until there are enough tokens; a target needs two tokens
        wanted = self._packing.seq_len + 1
        length = (
            sum(len(document.tokens) for _, document in self._documents_in_memory) - self._offset
        )
        while length < wanted and (next_document := next(self._documents, None)) is not None:
            self._documents_in_memory.append(next_document)
            length += len(next_document[1].tokens)
        length = min(length, wanted)
        if length < 2:
            return False

        # the window: the rest of the first document, complete documents, and the beginning of the last one
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
            mask = (
                np.ones(stop - start, np.bool_)
                if document.learned is None
                else document.learned[start:stop]
            )
            masks.append(mask)
            column += stop - start
        masked_tokens = any(
            document.learned is not None for _, document in self._documents_in_memory
        )
        write_window(
            out,
            slot,
            tokens=np.concatenate(parts).astype(np.int64),
            learned=np.concatenate(masks) if masked_tokens else None,
            begins=np.array(begins, np.int64) if self._packing.masked else None,
        )

        # The last token is also the first of the next row, so no target is lost between rows. A document is
        # released only when the next row begins after it.
        self.part = self._documents_in_memory[-1][0][0]
        self._offset += length - 1
        while self._documents_in_memory and self._offset >= len(
            self._documents_in_memory[0][1].tokens
        ):
            self._begin, document = self._documents_in_memory.popleft()
            self._offset -= len(document.tokens)
        return True


class FittedPacker:
    """Rows of complete documents, packed in blocks.

    A block never extends into the next epoch, so the rows of an epoch are the same whether or not another
    epoch follows.
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
        # the first document of the next block
        self._ahead: tuple[Place, Document] | None = None
        self._block: Rows | None = None
        # the places of the first document of the block and after its last, and the number of its rows
        # already returned
        self._begin: Place = (cursor[0], cursor[1])
        self._after = self._begin
        self._rows_returned = cursor[2]

    @property
    def cursor(self) -> Cursor:
        """Place of the block, and an offset in rows."""
        return (*self._begin, self._rows_returned)

    def write(self, out: PackedSequences, slot: int) -> bool:
        # a loop, because a block whose documents are all skipped as too long has no row
        """Fill a row from the current or the next block."""
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

        # after a resume the cursor may be within the block; its earlier rows are fitted again but not
        # returned
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
            # keep the first document of the next epoch for the next block
            if block and self._epoch(next_document) > self._epoch(block[0]):
                self._ahead = next_document
                break
            block.append(next_document)
        return block

    def _epoch(self, document: tuple[Place, Document]) -> int:
        return document[0][0] // self._parts_per_epoch
