"""Rows tokenized while training runs, by a fixed number of virtual readers among which the documents are dealt.

Row k of a stream belongs to reader k % V, whatever the number of ranks or workers; whoever needs a row runs its reader.
Over a table, reader v owns the slots v, v + V, v + 2V, ... of the epoch's permutation of all rows; over shards, it owns
every V-th shard, and takes them in an order of its own each epoch. So each document is read once per epoch.

A reader's cursor is (part, number, offset): the epoch (or epoch and shard), the number of the document within it, and
what was already given of what begins there, tokens ("concat") or rows ("first_fit", "padded").
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardtrain.data import sandbox, shared_opening
from shardtrain.data.digest import digest_of_files
from shardtrain.data.documents.bad_rows import around_bad_rows
from shardtrain.data.documents.encoded import Document, Encoder
from shardtrain.data.documents.read_documents import BadRows
from shardtrain.data.feed import Cursor, CursorUpdate, FilesWatch
from shardtrain.data.file_hashes import WholeFile
from shardtrain.data.order import sample_at
from shardtrain.data.packing.packed_rows import PackedSequences, Packing
from shardtrain.data.sources import Row, Shards, Table
from shardtrain.data.sources._data_files import FileSource
from shardtrain.data.streaming.stream_pack import FRUITLESS_PASSES, LostDocuments, Place, packer
from shardtrain.utils.errors import DataError

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 4
_LOOK_EVERY = 1024


class StreamFeed:
    """A feed of streams; ``num_readers`` is V, ``passes`` None repeats."""

    num_rows = num_documents = None
    ends_without_notice = True

    def __init__(
        self,
        source: Table | Shards,
        encoder: Encoder,
        packing: Packing,
        *,
        readers: int,
        seed: int | None,
        passes: int | None,
        vocab_size: int,
        name: str = "",
    ) -> None:
        self.source = source
        self.encoder = encoder
        self.packing = packing
        self.seed = seed
        self.passes = passes
        self.vocab_size = vocab_size
        self.lost = LostDocuments(name)

        # At most as many readers as there are documents or shards, and 16 rows' worth of bytes for each. It depends on
        # data and options alone, never on ranks or workers: which reader gives row k is part of the order.
        available = source.num_rows if isinstance(source, Table) else source.num_shards
        if available < 1:
            raise DataError("the dataset has no rows")
        if source.total_bytes is not None:
            available = min(available, source.total_bytes // (16 * packing.seq_len))
        self.num_readers = max(1, min(readers, available))
        self.mean_targets = float(packing.seq_len)  # of full rows; reading alone would tell
        self.files: Mapping[str, str] = source.files()
        facts = (encoder.fingerprint, asdict(packing), seed, self.num_readers)
        self.fingerprint = digest_of_files(self.files, *facts)

        # Where the last ``seek`` went, and the readers that have been asked for a row since.
        self._readers: dict[int, _Reader] = {}
        self._epoch = 0
        self._rows = 0
        self._cursors = np.zeros((self.num_readers, 3), dtype=np.int64)
        self._watch = FilesWatch(source.check_unchanged, len(self.files))
        place = source.listed_at if isinstance(source, FileSource) else ""
        self._looks = shared_opening.LooksAtSeek(source.check_unchanged, place)

    def write(self, k: int, out: PackedSequences, slot: int) -> tuple[int, CursorUpdate | None]:
        """Write the next row of reader k mod V into a slot.

        Raises:
            DataError: at a row that cannot be read.
            ConfigError: when a file was changed under the run.
        """
        self._watch()
        index = k % self.num_readers
        rows_before = k // self.num_readers
        reader = self._readers.get(index)
        if reader is None or reader.rows > rows_before:
            taken = rows_of_reader(self._rows, index, self.num_readers)
            part, number, offset = self._cursors[index].tolist()
            reader = self._readers[index] = _Reader(self, index, taken, (part, number, offset))
        # Rows of this reader that other ranks or workers take: reading them is the only way past them.
        while reader.rows < rows_before:
            reader.skip()
        given = reader.write(out, slot)
        return k if given else -1, CursorUpdate(index, reader.rows, reader.cursor, reader.epoch)

    def seek(self, rows: int, cursors: npt.NDArray[np.int64] | None) -> None:
        """Without cursors each reader begins at its start and reads up to its place."""
        self._looks()
        self._readers.clear()
        self._rows = rows
        self._cursors = np.zeros((self.num_readers, 3), dtype=np.int64)
        if cursors is None:
            self._rows = 0
        else:
            self._cursors = cursors
        parts = self._cursors[:, 0].tolist()
        self._epoch = max(part // self.walk(reader).parts_per_epoch for reader, part in enumerate(parts))

    def whole_files(self) -> list[WholeFile]:
        return self.source.whole_files() if isinstance(self.source, FileSource) else []

    def epoch_after(self, rows: int) -> int:
        """That of the foremost reader at the last ``seek``; what they give later tells the rest."""
        return self._epoch

    def walk(self, reader: int) -> _Walk:
        """The rows of a reader."""
        return _TableWalk(self, reader) if isinstance(self.source, Table) else _ShardWalk(self, reader)


def rows_of_reader(rows: int, reader: int, num_readers: int) -> int:
    """How many of the first ``rows`` rows of a stream are a reader's."""
    return max(0, (rows - reader + num_readers - 1) // num_readers)


class _Reader:
    """One virtual reader: its documents in their order, cut into rows."""

    def __init__(self, feed: StreamFeed, index: int, rows: int, cursor: Cursor) -> None:
        self._feed = feed
        self._index = index
        self.rows = rows
        self.cursor = cursor
        self._walk = feed.walk(index)
        documents = self._documents((cursor[0], cursor[1]))
        per_epoch = self._walk.parts_per_epoch
        self._packer = packer(feed.packing, documents, cursor, feed.vocab_size, per_epoch, feed.lost)
        self._scratch: PackedSequences | None = None

    @property
    def epoch(self) -> int:
        """Epoch of the row that was given last."""
        return self._packer.part // self._walk.parts_per_epoch

    def write(self, out: PackedSequences, slot: int) -> bool:
        """Fill a row; False, and nothing is written, at the end of the data."""
        given = self._packer.write(out, slot)
        self.rows += 1
        if given:
            self.cursor = self._packer.cursor
        return given

    def skip(self) -> None:
        """Pass over a row that another rank or worker takes."""
        if self._scratch is None:
            self._scratch = PackedSequences(1, self._feed.packing)
        self.write(self._scratch, 0)

    def _documents(self, start: Place) -> Iterator[tuple[Place, Document]]:
        """The reader's documents from a place on, each with the place after it."""
        policy = BadRows(fix='correct or remove the row, or run "shardtrain data prepare" with data.bad_rows="skip"')
        last_found = start[0]
        rows = self._walk.rows(start)
        # CPU time of this thread since the last document: waiting for storage does not count.
        limit = sandbox.limits().seconds
        since = time.thread_time()
        fruitless = 0
        while chunk := list(islice(rows, _ROWS_AT_ONCE)):
            results = around_bad_rows([row for _, row in chunk], self._feed.encoder.encode)
            for (place, _), result in zip(chunk, results, strict=True):
                if isinstance(result, Document):
                    last_found = place[0]
                    yield (place[0], place[1] + 1), result
                    since = time.thread_time()
                    fruitless = 0
                    continue

                # No document. Data of which nothing can be used would be read for ever, so there is an end to it: an
                # error after too much work, and the end of the reader after too many passes.
                fruitless += 1
                if fruitless % _LOOK_EVERY == 0 and time.thread_time() - since > limit:
                    rule = f"found no document in {fruitless} rows and data.artefact_seconds={limit} of CPU time"
                    raise DataError(
                        f"{self._walk.where(place)}: {rule} ({result.reason}); remove such rows, or raise it"
                    )
                if not result.harmless:
                    # Where a file was changed, that is what is wrong, and not its row.
                    self._feed.source.check_unchanged()
                policy.meet(result, self._walk.where(place))
                self._feed.lost.add({f"are left out: {result.reason}": 1}, logging.INFO)
                if place[0] > last_found + FRUITLESS_PASSES * self._walk.parts_per_epoch:
                    text = "reader %d of %d found no document in %d passes, and gives none any more: %s"
                    logger.warning(text, self._index, self._feed.num_readers, FRUITLESS_PASSES, result.reason)
                    return


class _Walk(Protocol):
    """The rows of one reader, epoch after epoch."""

    parts_per_epoch: int

    def rows(self, start: Place) -> Iterator[tuple[Place, Row]]:
        """Rows from a place on, each with its place."""
        ...

    def where(self, place: Place) -> str:
        """Where a person finds the row at a place."""
        ...


class _TableWalk:
    parts_per_epoch = 1

    def __init__(self, feed: StreamFeed, reader: int) -> None:
        assert isinstance(feed.source, Table)
        self._source = feed.source
        self._feed = feed
        self._reader = reader
        self._own = len(range(reader, feed.source.num_rows, feed.num_readers))

    def rows(self, start: Place) -> Iterator[tuple[Place, Row]]:
        epoch, number = start
        while self._feed.passes is None or epoch < self._feed.passes:
            while number < self._own:
                for index in self._indices(epoch, number, min(number + 1024, self._own)):
                    yield (epoch, number), self._source.row(index)
                    number += 1
            epoch += 1
            number = 0

    def where(self, place: Place) -> str:
        return self._source.place(self._indices(place[0], place[1], place[1] + 1)[0])

    def _indices(self, epoch: int, start: int, stop: int) -> list[int]:
        total = self._source.num_rows
        rows = np.arange(start, stop, dtype=np.int64) * self._feed.num_readers + self._reader
        if self._feed.seed is not None:
            rows = sample_at(epoch * total + rows, total, self._feed.seed)
        indices: list[int] = rows.tolist()
        return indices


class _ShardWalk:
    def __init__(self, feed: StreamFeed, reader: int) -> None:
        assert not isinstance(feed.source, Table)
        self._source = feed.source
        self._feed = feed
        self._reader = reader
        self._own = range(reader, feed.source.num_shards, feed.num_readers)
        self.parts_per_epoch = len(self._own)

    def rows(self, start: Place) -> Iterator[tuple[Place, Row]]:
        part, number = start
        last_filled = part
        while self._feed.passes is None or part < self._feed.passes * self.parts_per_epoch:
            for row in self._source.rows(self._shard(part), number):
                yield (part, number), row
                number += 1
                last_filled = part
            # All shards of the reader are empty: without an end to it, it would walk over them for ever.
            if part > last_filled + self.parts_per_epoch:
                text = "reader %d of %d found no row in a pass over its shards, and gives none any more"
                logger.warning(text, self._reader, self._feed.num_readers)
                return
            part += 1
            number = 0

    def where(self, place: Place) -> str:
        return self._source.shard_place(self._shard(place[0]), place[1])

    def _shard(self, part: int) -> int:
        """The shard of a part: each epoch goes through all of the reader's shards, in an order of its own."""
        if self._feed.seed is None:
            return self._own[part % len(self._own)]
        return self._own[int(sample_at(part, len(self._own), self._feed.seed))]
