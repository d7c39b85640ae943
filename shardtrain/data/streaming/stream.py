"""Tokenize rows during training. A fixed number V of virtual readers divide the documents among them.

Row k of a stream belongs to reader k % V, for any number of ranks and workers. The rank or worker that
needs a row runs its reader. If the source is a table, reader v reads the slots v, v + V, v + 2V, ... of the
epoch's permutation of all rows. If it consists of shards, the reader reads every V-th shard, in a different
order in each epoch. In both cases, each document is read once per epoch.

The cursor of a reader is (part, number, offset). ``part`` is the epoch, or for shards the epoch and the
shard. ``number`` is the index of a document in this part. ``offset`` counts what was already returned from
this document on: tokens for "concat", rows for "first_fit" and "padded".
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
from shardtrain.data.file_hashes import FileToHash
from shardtrain.data.order import sample_at
from shardtrain.data.packing.packed_rows import PackedSequences, Packing
from shardtrain.data.sources import Row, Shards, Table
from shardtrain.data.sources._data_files import FileSource
from shardtrain.data.streaming.stream_pack import FRUITLESS_PASSES, LostDocuments, Place, packer
from shardtrain.utils.errors import DataError

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 4
_CHECK_INTERVAL = 1024


class StreamFeed:
    """A feed of a dataset that is tokenized during training.

    ``num_readers`` is V. If ``passes`` is None, the data are repeated forever.
    """

    num_rows = num_documents = None
    has_unknown_end = True

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

        # Use at most one reader per document or shard, and at most one per 16 rows (assuming a byte per
        # token). The number determines the order of rows, so it must depend only on data and options, and
        # never on ranks or workers.
        available = source.num_rows if isinstance(source, Table) else source.num_shards
        if available < 1:
            raise DataError("the dataset has no rows")
        if source.total_bytes is not None:
            available = min(available, source.total_bytes // (16 * packing.seq_len))
        self.num_readers = max(1, min(readers, available))
        # Assume that rows are full, because the true mean is known only after reading.
        self.mean_targets = float(packing.seq_len)
        self.files: Mapping[str, str] = source.files()
        facts = (encoder.fingerprint, asdict(packing), seed, self.num_readers)
        self.fingerprint = digest_of_files(self.files, *facts)

        # The readers that were needed since the last ``seek``, and the position of this seek.
        self._readers: dict[int, _Reader] = {}
        self._epoch = 0
        self._rows = 0
        self._cursors = np.zeros((self.num_readers, 3), dtype=np.int64)
        self._watch = FilesWatch(source.check_unchanged, len(self.files))
        place = source.listed_at if isinstance(source, FileSource) else ""
        self._check_files = shared_opening.CheckAtSeek(source.check_unchanged, place)

    def write(self, k: int, out: PackedSequences, slot: int) -> tuple[int, CursorUpdate | None]:
        """Write row k, the next row of reader k % V, into a slot.

        Return k (or -1 at the end of the data) and the reader's new cursor.

        Raises:
            DataError: a row cannot be read.
            ConfigError: a file was changed during the run.
        """
        self._watch()
        index = k % self.num_readers
        rows_before = k // self.num_readers
        reader = self._readers.get(index)
        if reader is None or reader.rows > rows_before:
            taken = rows_of_reader(self._rows, index, self.num_readers)
            part, number, offset = self._cursors[index].tolist()
            reader = _Reader(self, index, taken, (part, number, offset))
            self._readers[index] = reader
        # Other ranks or workers use the rows in between. A reader can skip rows only by reading them.
        while reader.rows < rows_before:
            reader.skip()
        has_row = reader.write(out, slot)
        number_of_row = k if has_row else -1
        return number_of_row, CursorUpdate(index, reader.rows, reader.cursor, reader.epoch)

    def seek(self, rows: int, cursors: npt.NDArray[np.int64] | None) -> None:
        """Move all readers to their cursors.

        Without cursors, each reader starts at its beginning,
        and reads until it reaches the row that it needs.
        """
        self._check_files()
        self._readers.clear()
        self._rows = rows
        self._cursors = np.zeros((self.num_readers, 3), dtype=np.int64)
        if cursors is None:
            self._rows = 0
        else:
            self._cursors = cursors
        parts = self._cursors[:, 0].tolist()
        self._epoch = max(
            part // self.walk(reader).parts_per_epoch for reader, part in enumerate(parts)
        )

    def files_to_hash(self) -> list[FileToHash]:
        return self.source.files_to_hash() if isinstance(self.source, FileSource) else []

    def epoch_after(self, rows: int) -> int:
        """Return the epoch of the most advanced reader at the last ``seek``.

        Later epochs are known from the results of ``write``.
        """
        return self._epoch

    def walk(self, reader: int) -> _Walk:
        """Return the iterator over the source's rows that belong to a reader."""
        if isinstance(self.source, Table):
            return _TableWalk(self, reader)
        return _ShardWalk(self, reader)


def rows_of_reader(rows: int, reader: int, num_readers: int) -> int:
    """Return how many of the first ``rows`` rows of a stream belong to a reader."""
    return max(0, (rows - reader + num_readers - 1) // num_readers)


class _Reader:
    """One virtual reader. It packs its documents, in order, into rows."""

    def __init__(self, feed: StreamFeed, index: int, rows: int, cursor: Cursor) -> None:
        self._feed = feed
        self._index = index
        self.rows = rows
        self.cursor = cursor
        self._walk = feed.walk(index)
        documents = self._documents((cursor[0], cursor[1]))
        per_epoch = self._walk.parts_per_epoch
        self._packer = packer(
            feed.packing, documents, cursor, feed.vocab_size, per_epoch, feed.lost
        )
        self._scratch: PackedSequences | None = None

    @property
    def epoch(self) -> int:
        """Epoch of the last row."""
        return self._packer.part // self._walk.parts_per_epoch

    def write(self, out: PackedSequences, slot: int) -> bool:
        """Fill a row. At the end of the data, write nothing and return False."""
        has_row = self._packer.write(out, slot)
        self.rows += 1
        if has_row:
            self.cursor = self._packer.cursor
        return has_row

    def skip(self) -> None:
        """Skip a row that another rank or worker uses."""
        if self._scratch is None:
            self._scratch = PackedSequences(1, self._feed.packing)
        self.write(self._scratch, 0)

    def _documents(self, start: Place) -> Iterator[tuple[Place, Document]]:
        """Yield the reader's documents, starting at a place. Each comes with the place after it."""
        policy = BadRows(
            fix='correct or remove the row, or run "shardtrain data prepare" with data.bad_rows="skip"'
        )
        last_part_with_document = start[0]
        rows = self._walk.rows(start)
        # Limit the CPU time of this thread between documents. It does not include waiting for storage.
        limit = sandbox.limits().seconds
        since = time.thread_time()
        rows_without_document = 0
        while chunk := list(islice(rows, _ROWS_AT_ONCE)):
            results = around_bad_rows([row for _, row in chunk], self._feed.encoder.encode)
            for (place, _), result in zip(chunk, results, strict=True):
                if isinstance(result, Document):
                    last_part_with_document = place[0]
                    yield (place[0], place[1] + 1), result
                    since = time.thread_time()
                    rows_without_document = 0
                    continue

                # The row has no document. If no row is usable, the reader must not run forever. So raise an
                # error after too much work, and end the reader after too many passes.
                rows_without_document += 1
                is_check_due = rows_without_document % _CHECK_INTERVAL == 0
                if is_check_due and time.thread_time() - since > limit:
                    rule = (
                        f"found no document in {rows_without_document} rows and data.artefact_seconds={limit} of CPU "
                        f"time ({result.reason})"
                    )
                    raise DataError(
                        f"{self._walk.where(place)}: {rule}; remove such rows, or raise the limit"
                    )
                if not result.harmless:
                    # If the file was changed, report this instead of the bad row.
                    self._feed.source.check_unchanged()
                policy.meet(result, self._walk.where(place))
                self._feed.lost.add({f"are skipped: {result.reason}": 1}, logging.INFO)
                max_parts = FRUITLESS_PASSES * self._walk.parts_per_epoch
                if place[0] > last_part_with_document + max_parts:
                    text = "reader %d of %d found no document in %d passes and ends: %s"
                    logger.warning(
                        text, self._index, self._feed.num_readers, FRUITLESS_PASSES, result.reason
                    )
                    return


class _Walk(Protocol):
    """Interface of an iterator over the rows of one reader, epoch after epoch."""

    parts_per_epoch: int

    def rows(self, start: Place) -> Iterator[tuple[Place, Row]]:
        """Yield rows with their places, starting at a place."""
        ...

    def where(self, place: Place) -> str:
        """Return the file and line of a place, for messages."""
        ...


class _TableWalk:
    """Rows of a reader over a table."""

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
    """Rows of a reader over shards."""

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
            # End the reader if all of its shards are empty.
            if part > last_filled + self.parts_per_epoch:
                text = "reader %d of %d found no row in a pass over its shards and ends"
                logger.warning(text, self._reader, self._feed.num_readers)
                return
            part += 1
            number = 0

    def where(self, place: Place) -> str:
        return self._source.shard_place(self._shard(place[0]), place[1])

    def _shard(self, part: int) -> int:
        """Return the shard of a part. Each epoch reads all of the reader's shards, in a different order."""
        if self._feed.seed is None:
            return self._own[part % len(self._own)]
        return self._own[int(sample_at(part, len(self._own), self._feed.seed))]
