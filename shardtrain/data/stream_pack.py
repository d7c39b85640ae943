"""Documents that arrive one after the other to rows, with a cursor from which the next row can be made again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Protocol

import numpy as np

from shardtrain.data.document import Document
from shardtrain.data.feed import Cursor
from shardtrain.data.fitted import pack
from shardtrain.data.line import MemoryLine
from shardtrain.data.pack import Packing, Rows, Sequences, write_window

BLOCK_DOCUMENTS = 128
"""Documents that a reader fits into rows together; part of the order of the data, so it never changes."""

Place = tuple[int, int]
"""Which document a reader takes next: its epoch or shard, and its number there."""

Documents = Iterator[tuple[Place, Document]]
"""Documents, each with the place after it."""


class Packer(Protocol):
    """Rows out of documents."""

    @property
    def cursor(self) -> Cursor:
        """The place of the document with which the next row begins, and what of it (or its block) is already given."""
        ...

    def write(self, out: Sequences, slot: int) -> bool:
        """Fill a row; False, and nothing is written, when no documents are left."""
        ...


def packer(packing: Packing, documents: Documents, cursor: Cursor, vocab_size: int) -> Packer:
    """The rows of documents that begin at a cursor."""
    if packing.kind == "concat":
        return ConcatPacker(packing, documents, cursor)
    return FittedPacker(packing, documents, cursor, vocab_size)


class ConcatPacker:
    """Windows of ``seq_len + 1`` tokens; the last token of one is the first of the next."""

    def __init__(self, packing: Packing, documents: Documents, cursor: Cursor) -> None:
        self._packing, self._documents = packing, documents
        self._held: deque[tuple[Place, Document]] = deque()
        self._begin: Place = (cursor[0], cursor[1])  # of the first document held
        self._offset = cursor[2]  # tokens of it that are already given

    @property
    def cursor(self) -> Cursor:
        """See Packer; the rest is in tokens."""
        return (*self._begin, self._offset)

    def write(self, out: Sequences, slot: int) -> bool:
        """See Packer; the last row is filled up where tokens are missing."""
        length = self._hold(self._packing.seq_len + 1)
        if length < 2:
            return False
        parts, masks, begins, column = [], [], [], 0
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
        self._pass_over(length - 1)
        return True

    def _hold(self, wanted: int) -> int:
        """Take documents until there are ``wanted`` tokens; gives how many of them there are."""
        have = sum(len(document.tokens) for _, document in self._held) - self._offset
        while have < wanted:
            following = next(self._documents, None)
            if following is None:
                break
            self._held.append(following)
            have += len(following[1].tokens)
        return min(have, wanted)

    def _pass_over(self, count: int) -> None:
        """Move on by some tokens; documents that are wholly behind are let go."""
        self._offset += count
        while self._held and self._offset >= len(self._held[0][1].tokens):
            self._begin, document = self._held.popleft()
            self._offset -= len(document.tokens)


class FittedPacker:
    """Rows of whole documents, a block of documents at a time."""

    def __init__(self, packing: Packing, documents: Documents, cursor: Cursor, vocab_size: int) -> None:
        self._packing, self._documents, self._vocab_size = packing, documents, vocab_size
        self._block: Rows | None = None
        self._begin: Place = (cursor[0], cursor[1])  # of the block
        self._after = self._begin
        self._given = cursor[2]  # rows of the block

    @property
    def cursor(self) -> Cursor:
        """See Packer; the rest is in rows of the block."""
        return (*self._begin, self._given)

    def write(self, out: Sequences, slot: int) -> bool:
        """See Packer."""
        while self._block is None or self._given == self._block.num_rows:
            if self._block is not None:
                self._begin, self._given, self._block = self._after, 0, None
            block = list(islice(self._documents, BLOCK_DOCUMENTS))
            if not block:
                return False
            self._after = block[-1][0]
            self._block = pack(MemoryLine((document for _, document in block), self._vocab_size), self._packing)
        self._block.write(self._given, out, slot)
        self._given += 1
        return True
