"""Documents that arrive one after the other to rows, with a cursor from which the next row can be made again."""

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
"""Passes without a row after which a reader gives none any more."""
BLOCK_DOCUMENTS = 128
"""Documents that a reader fits into rows together; part of the order of the data, so it never changes."""

Place = tuple[int, int]
"""Which document a reader takes next: its epoch or shard, and its number there."""

Documents = Iterator[tuple[Place, Document]]
"""Documents, each with the place after it."""


class Packer(Protocol):
    """Rows out of documents.

    part: the epoch, or the epoch and shard, of the last document in the row that was written last.
    """

    part: int

    @property
    def cursor(self) -> Cursor:
        """The place of the document with which the next row begins, and what of it (or its block) is already given."""
        ...

    def write(self, out: PackedSequences, slot: int) -> bool:
        """Fill a row; False, and nothing is written, when no documents are left."""
        ...


class LostDocuments:
    """Counts of the documents that a stream has cut or skipped in this process so far, by what happened to them.

    A count is logged when it passes a power of two, because the final count is unknown until the stream ends.
    """

    def __init__(self, dataset: str) -> None:
        self._dataset = dataset
        self._counts: Counter[str] = Counter()

    def add(self, counts: Mapping[str, int], level: int = logging.WARNING) -> None:
        for fate, count in counts.items():
            before = self._counts[fate]
            self._counts[fate] += count
            if self._counts[fate].bit_length() > before.bit_length():
                logger.log(level, "dataset %s: %d documents so far %s", self._dataset, before + count, fate)


def packer(
    packing: Packing,
    documents: Documents,
    cursor: Cursor,
    vocab_size: int,
    parts_per_epoch: int,
    lost: LostDocuments,
) -> Packer:
    """Return the packer for documents from ``cursor`` on. ``lost`` counts documents that are cut or do not fit."""
    if packing.kind == "concat":
        return ConcatPacker(packing, documents, cursor)
    return FittedPacker(packing, documents, cursor, vocab_size, parts_per_epoch, lost)


class ConcatPacker:
    """Windows of ``seq_len + 1`` tokens; the last token of one is the first of the next."""

    def __init__(self, packing: Packing, documents: Documents, cursor: Cursor) -> None:
        self._packing = packing
        self._documents = documents
        self.part = cursor[0]
        self._held: deque[tuple[Place, Document]] = deque()
        self._begin: Place = (cursor[0], cursor[1])  # of the first document held
        self._offset = cursor[2]  # tokens of it that are already given

    @property
    def cursor(self) -> Cursor:
        """The rest is in tokens."""
        return (*self._begin, self._offset)

    def write(self, out: PackedSequences, slot: int) -> bool:
        """The last row is filled up where tokens are missing."""
        # Take documents until there are enough tokens. A target needs two of them.
        wanted = self._packing.seq_len + 1
        length = sum(len(document.tokens) for _, document in self._held) - self._offset
        while length < wanted and (following := next(self._documents, None)) is not None:
            self._held.append(following)
            length += len(following[1].tokens)
        length = min(length, wanted)
        if length < 2:
            return False

        # The window: what the first document has left, whole documents, and the beginning of the last.
        parts = []
        masks = []
        begins = []
        column = 0
        for index, (_, document) in enumerate(self._held):
            start = self._offset if index == 0 else 0
            stop = min(len(document.tokens), start + length - column)
            if start == stop:
                continue
            if column and start == 0:
                begins.append(column)
            parts.append(document.tokens[start:stop])
            masks.append(np.ones(stop - start, np.bool_) if document.learned is None else document.learned[start:stop])
            column += stop - start
        masked_tokens = any(document.learned is not None for _, document in self._held)
        write_window(
            out,
            slot,
            np.concatenate(parts).astype(np.int64),
            np.concatenate(masks) if masked_tokens else None,
            np.array(begins, np.int64) if self._packing.masked else None,
        )

        # The last token is the first one of the next row: no target is lost between two rows. So a document is let go
        # only when the place to continue from lies behind it.
        self.part = self._held[-1][0][0]
        self._offset += length - 1
        while self._held and self._offset >= len(self._held[0][1].tokens):
            self._begin, document = self._held.popleft()
            self._offset -= len(document.tokens)
        return True


class FittedPacker:
    """Rows of whole documents, a block of documents at a time.

    A block never reaches into the next epoch: rows of an epoch are the same whether or not another follows it.
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
        self._ahead: tuple[Place, Document] | None = None  # the first document of the next block
        self._block: Rows | None = None
        self._begin: Place = (cursor[0], cursor[1])  # of the block
        self._after = self._begin
        self._given = cursor[2]  # rows of the block

    @property
    def cursor(self) -> Cursor:
        """The rest is in rows of the block."""
        return (*self._begin, self._given)

    def write(self, out: PackedSequences, slot: int) -> bool:
        # A loop, since a block whose documents are all dropped as too long has no row.
        while self._block is None or self._given == self._block.num_rows:
            if self._block is not None:
                self._begin = self._after
                self._given = 0
                self._block = None
            block = self._next_block()
            if not block:
                return False
            self._after = block[-1][0]
            self._block = pack(MemoryTokenBuffer((document for _, document in block), self._vocab_size), self._packing)
            self._lost.add(fates(self._block))
            if not self._block.num_rows and self._after[0] > self.part + FRUITLESS_PASSES * self._parts_per_epoch:
                text = "a reader has no document that fits, in %d passes, and gives none any more (data.long_documents)"
                logger.warning(text, FRUITLESS_PASSES)
                self._documents = iter(())
                self._ahead = None

        # On a resume the cursor may lie within the block: rows before it are fitted again, and not given again.
        self._block.write(self._given, out, slot)
        self._given += 1
        self.part = self._after[0]
        return True

    def _next_block(self) -> list[tuple[Place, Document]]:
        """Up to 128 documents of one epoch; none at the end."""
        block: list[tuple[Place, Document]] = []
        while len(block) < BLOCK_DOCUMENTS:
            following = self._ahead or next(self._documents, None)
            self._ahead = None
            if following is None:
                break
            # The next epoch has begun: its first document is kept for the block after this one.
            if block and self._epoch(following) > self._epoch(block[0]):
                self._ahead = following
                break
            block.append(following)
        return block

    def _epoch(self, document: tuple[Place, Document]) -> int:
        return document[0][0] // self._parts_per_epoch
