"""Statistics of a dataset from one pass over it: counts, lengths, bad rows and a hash of each document.

They need 16 bytes of memory per document. Documents are equal if their tokens are. With hashes of 64
bits, one in about 40 passes over 10^9 documents has a false pair.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtrain.data.documents.encoded import Document, Encoder
from shardtrain.data.documents.read_documents import BadRows, RowStats, chunks, read_documents
from shardtrain.data.packing.fitted import pack
from shardtrain.data.packing.packed_rows import Packing, Rows
from shardtrain.data.packing.token_buffer import Mask, MemoryTokenBuffer
from shardtrain.data.prepared.shards import ShardTokenBuffer, verify
from shardtrain.data.sources import BadRow, Key, Shards, Table, every_row, place_of, rows_of

_EXAMPLES = 3
_BLOCK_TOKENS = 2**20
Hashes = npt.NDArray[np.uint64]


@dataclass
class Survey:
    """Statistics of one dataset.

    Attributes:
        name: Name of the dataset.
        tally: Counts of rows, documents and tokens.
        hashes: Hash of each document, in the order of the dataset.
        lengths: Tokens of each document, including bos and eos.
        first_targets: Index of the first learned target in each document, or the length if it has none.
        max_id: Largest token id, or -1 without tokens.
        damage: Messages about damaged files of prepared shards.
        place: Function that returns the file and line of a document, by its number.
    """

    name: str
    tally: RowStats = field(default_factory=RowStats)
    hashes: Hashes = field(default_factory=lambda: np.array([], np.uint64))
    lengths: npt.NDArray[np.int64] = field(default_factory=lambda: np.array([], np.int64))
    first_targets: npt.NDArray[np.int64] = field(default_factory=lambda: np.array([], np.int64))
    max_id: int = -1
    damage: list[str] = field(default_factory=list)
    place: Callable[[int], str] = str

    def duplicates(self) -> tuple[int, list[tuple[str, str]]]:
        """Return the number of documents that repeat an earlier one, and examples.

        An example is the place of the repetition and the place of the first occurrence.
        """
        # first_of_hash[which[d]] is the first document with the same hash as document d.
        _, first_of_hash, which = np.unique(self.hashes, return_index=True, return_inverse=True)
        first = first_of_hash[which]
        repeated = np.flatnonzero(first != np.arange(len(which)))
        examples = []
        for document in repeated[:_EXAMPLES]:
            examples.append((self.place(int(document)), self.place(int(first[document]))))
        return len(repeated), examples

    def shared_with(self, others: list[Survey]) -> tuple[int, list[str]]:
        """Return the number of documents that other datasets also contain, and the places of some of them."""
        hashes_of_others = np.array([], np.uint64)
        if others:
            hashes_of_others = np.concatenate([other.hashes for other in others])
        shared = np.flatnonzero(np.isin(self.hashes, hashes_of_others))
        examples = [self.place(int(document)) for document in shared[:_EXAMPLES]]
        return len(shared), examples

    def rows(self, packing: Packing) -> Rows:
        """Pack the documents as training does in one pass.

        The rows can be counted, but their tokens cannot be read.
        """
        return pack(_Lengths(self.lengths, self.first_targets), packing)


class _Lengths(MemoryTokenBuffer):
    """Token buffer with only the lengths and first targets of documents, which suffices to count rows."""

    def __init__(
        self, lengths: npt.NDArray[np.int64], first_targets: npt.NDArray[np.int64]
    ) -> None:
        super().__init__([], 1)
        self._starts = np.cumsum(lengths) - lengths
        self._first_targets = np.append(self._starts + first_targets, -1)
        self.num_tokens = int(lengths.sum())
        self.num_documents = len(lengths)
        self.has_mask = True

    def learned(self, start: int, stop: int) -> Mask:
        """Return a mask of the first target of each document."""
        next_target = self._first_targets[np.searchsorted(self._first_targets[:-1], start)]
        return np.arange(start, stop) == next_target


class _Collector:
    """Collect hashes and lengths of documents."""

    def __init__(self) -> None:
        self._hashes = array("Q")
        self._lengths = array("I")
        self._first_targets = array("I")
        self._max_id = -1

    def add(self, tokens: npt.NDArray[Any], learned: Mask | None) -> None:
        content = np.ascontiguousarray(tokens, dtype="<i4")
        digest = hashlib.blake2b(content.tobytes(), digest_size=8).digest()
        self._hashes.append(int.from_bytes(digest, "little"))
        self._lengths.append(len(content))
        # The first token of a document is not a target. The appended entry stands for a document without
        # targets.
        first_target = 1
        if learned is not None:
            first_target += int(np.append(learned[1:], True).argmax())
        self._first_targets.append(first_target)
        if len(content):
            self._max_id = max(self._max_id, int(content.max()))

    def into(self, survey: Survey) -> Survey:
        # ``frombuffer`` rejects an empty buffer.
        if len(self._hashes):
            survey.hashes = np.frombuffer(self._hashes, dtype=np.uint64)
        survey.lengths = np.array(self._lengths, dtype=np.int64)
        survey.first_targets = np.array(self._first_targets, dtype=np.int64)
        survey.max_id = self._max_id
        return survey


def survey_rows(
    name: str, source: Table | Shards, encoder: Encoder, tick: Callable[[int], None]
) -> Survey:
    """Read all rows of a source, and skip bad ones.

    ``tick`` is called with the number of rows of each part.
    """
    # A place for each document would take too much memory. Record only the first row of each chunk, and
    # the number of documents before it.
    survey = Survey(name)
    collector = _Collector()
    skip_all = BadRows(skip=True, max_fraction=1.0)
    documents_before = array("Q")
    first_keys: list[Key] = []
    for chunk in chunks(iter(every_row(source))):
        documents_before.append(survey.tally.documents)
        first_key, _ = chunk[0]
        first_keys.append(first_key)
        for document in read_documents(source, encoder, skip_all, survey.tally, chunk):
            collector.add(document.tokens, document.learned)
        tick(len(chunk))

    def place(number: int) -> str:
        """Read the part with a document again, and count up to it."""
        part = bisect_right(documents_before, number) - 1
        shard, first_row = first_keys[part]
        remaining = number - documents_before[part]
        contents = islice(rows_of(source, shard, first_row), 4096)
        for row, content in enumerate(contents, start=first_row):
            if isinstance(content, BadRow):
                continue
            (document,) = encoder.encode([content])
            if not isinstance(document, Document):
                continue
            if remaining == 0:
                return place_of(source, (shard, row))
            remaining -= 1
        return f"document {number}"

    survey.place = place
    source.check_unchanged()
    return collector.into(survey)


def survey_line(name: str, line: ShardTokenBuffer, tick: Callable[[int], None]) -> Survey:
    """Verify every byte of prepared shards, then read their documents.

    ``tick`` is called with the number of documents of each part.
    """
    survey = Survey(name)
    collector = _Collector()
    for _, damages in verify(line):
        survey.damage += damages

    starts = line.document_starts()
    at = 0
    while at < line.num_documents and not survey.damage:
        # Read at least one document, and at most about one block of tokens, at a time.
        stop = int(np.searchsorted(starts, starts[at] + _BLOCK_TOKENS))
        stop = min(max(at + 1, stop), line.num_documents)
        base = int(starts[at])
        end = line.num_tokens
        if stop < line.num_documents:
            end = int(starts[stop])
        tokens = line.tokens(base, end)
        learned = line.learned(base, end)
        offsets = np.append(starts[at:stop], end) - base
        for first, last in itertools.pairwise(offsets):
            collector.add(tokens[first:last], learned[first:last])
        survey.tally.learned += int(learned.sum())
        tick(stop - at)
        at = stop
    survey.tally.rows = line.num_documents
    survey.tally.documents = line.num_documents
    survey.tally.tokens = line.num_tokens
    survey.place = _document_number
    return collector.into(survey)


def _document_number(number: int) -> str:
    """Name a document of prepared shards, which do not record the rows that they came from."""
    return f"document {number}"
