"""Units of work of ``data prepare``: a part of a source that one process tokenizes into its own files.

Units depend only on the source and not on the number of processes, so their concatenated files always
have the same bytes. The ``.json`` file of a unit is written last and marks it as finished.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from shardtrain.data.documents.encoded import Document, Encoder
from shardtrain.data.documents.read_documents import BadRows, RowStats, chunks, read_documents
from shardtrain.data.packing.token_buffer import Mask
from shardtrain.data.prepared.shard_index import DTYPES, dtype_for
from shardtrain.data.prepared.shard_writer import ShardWriter, beyond_vocabulary, storing
from shardtrain.data.sources import Key, Row, Shards, Table, rows_of
from shardtrain.utils import atomic_io, bounded_reads, checked_json

UNIT_BYTES = 4 * 2**20
"""Approximate input of a unit of a table. It takes a second or two."""
_MOST_ROWS = 2**17
_ROWS_OF_UNKNOWN_SIZE = 4096
"""Rows of a unit if the size of the rows is unknown."""
_FLUSH_TOKENS = 2**20
"""Number of tokens in memory after which they are written."""
_BLOCK_BYTES = 4 * 2**20

Say = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Unit:
    """Rows from ``start`` up to ``stop`` (None for the end) of one shard of a source. A table is shard 0."""

    number: int
    shard: int
    start: int
    stop: int | None


def rows_per_unit(source: Table | Shards) -> int | None:
    """Return the rows per unit of a table. None for other sources, where a unit is an entire shard."""
    if not isinstance(source, Table):
        return None
    if not source.total_bytes:
        return _ROWS_OF_UNKNOWN_SIZE
    num_rows = UNIT_BYTES * source.num_rows // source.total_bytes
    return max(1, min(_MOST_ROWS, num_rows))


class Units:
    """The units of a source, in its order, created on access."""

    def __init__(self, source: Table | Shards) -> None:
        self._rows = rows_per_unit(source)
        self._num_rows = 0
        self._num = 0
        if not isinstance(source, Table):
            self._num = source.num_shards
        elif self._rows:
            self._num_rows = source.num_rows
            self._num = math.ceil(self._num_rows / self._rows)

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, number: int) -> Unit:
        if not 0 <= number < self._num:
            raise IndexError(number)
        if self._rows is None:
            return Unit(number, number, 0, None)
        start = number * self._rows
        stop = min(start + self._rows, self._num_rows)
        return Unit(number, 0, start, stop)


def unit_rows(source: Table | Shards, unit: Unit) -> Iterator[tuple[Key, Row]]:
    """Yield the rows of a unit with their keys."""
    if isinstance(source, Table):
        stop = unit.stop
        if stop is None:
            stop = source.num_rows
        for number in range(unit.start, stop):
            yield (unit.shard, number), source.row(number)
        return
    # A unit of a source of shards is an entire shard.
    rows = rows_of(source, unit.shard, unit.start)
    for number, row in enumerate(rows, start=unit.start):
        yield (unit.shard, number), row


def documents_of(
    source: Table | Shards,
    encoder: Encoder,
    policy: BadRows,
    tally: RowStats,
    unit: Unit,
    tick: Callable[[], None],
) -> Iterator[Document]:
    """Yield the documents of a unit. ``tick`` is called after each chunk of rows."""
    for chunk in chunks(unit_rows(source, unit)):
        yield from read_documents(source, encoder, policy, tally, chunk)
        tick()


def write_unit(
    folder: Path,
    source: Table | Shards,
    encoder: Encoder,
    policy: BadRows,
    unit: Unit,
    say: Say,
) -> dict[str, Any]:
    """Tokenize a unit into files in ``folder``. Return the content of its ``.json`` file.

    ``say`` is called with the rows and tokens since its last call.

    Raises:
        DataError: a row is bad, and the policy does not skip it.
        StorageError: a file cannot be written.
    """
    tally = RowStats()
    vocab_size = encoder.tokenizer.vocab_size
    reported = RowStats()

    def tick() -> None:
        new_rows = tally.rows - reported.rows
        new_tokens = tally.tokens - reported.tokens
        say({"rows": new_rows, "tokens": new_tokens})
        reported.rows = tally.rows
        reported.tokens = tally.tokens

    files = _UnitFiles(folder, unit, vocab_size)
    try:
        for document in documents_of(source, encoder, policy, tally, unit, tick):
            files.add(document)
        with storing(folder):
            hashes = files.finish()
        # This file marks the unit as finished, so it is written last.
        done = {"unit": unit.number, "files": hashes, "tally": tally_to_json(tally)}
        with storing(folder):
            atomic_io.write(folder / unit_name(unit, "json"), json.dumps(done))
    finally:
        # After ``finish`` there is nothing left to remove.
        files.abandon()
    return done


def unit_name(unit: Unit, ending: str) -> str:
    """Return the name of a file of a unit: ``unit-00000007.tokens``."""
    return f"unit-{unit.number:08d}.{ending}"


def content_if_done(folder: Path, unit: Unit) -> dict[str, Any] | None:
    """Return the content of the ``.json`` file of a unit.

    None if it is not finished or one of its files is damaged.
    """
    # Files of an interrupted preparation may be damaged in any way. Such a unit is simply tokenized again.
    try:
        content = bounded_reads.read_all(folder / unit_name(unit, "json"), 2**28)
        done = checked_json.parse(content, memory_bytes=checked_json.LARGE_MEMORY_BYTES)
        for ending, sha256 in done["files"].items():
            if _sha256(folder / unit_name(unit, ending)) != sha256:
                return None
        tally_from_json(done["tally"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if done.get("unit") != unit.number:
        return None
    return done


def append_unit(folder: Path, unit: Unit, done: Mapping[str, Any], writer: ShardWriter) -> None:
    """Append the documents of a finished unit to a writer."""
    with storing(folder):
        for content in _blocks(folder / unit_name(unit, "lengths"), 4):
            writer.add_documents(np.frombuffer(content, dtype="<i4"))

        # Blocks of both files have the same number of tokens.
        masks = None
        if "learned" in done["files"]:
            masks = _blocks(folder / unit_name(unit, "learned"), 1, writer.dtype)
        token_file = folder / unit_name(unit, "tokens")
        for content in _blocks(token_file, writer.dtype.itemsize, writer.dtype):
            tokens = np.frombuffer(content, dtype=writer.dtype)
            mask = None
            if masks is not None:
                mask = np.frombuffer(next(masks), dtype=np.uint8) != 0
            writer.add_tokens(tokens, mask)


def remove_unit(folder: Path, unit: Unit) -> None:
    """Delete the files of a unit. The ``.json`` file, which marks it as finished, is first."""
    for ending in ("json", "tokens", "lengths", "learned"):
        (folder / unit_name(unit, ending)).unlink(missing_ok=True)


class _UnitFiles:
    """The files of an unfinished unit, with temporary names that contain the process id."""

    def __init__(self, folder: Path, unit: Unit, vocab_size: int) -> None:
        self._folder = folder
        self._unit = unit
        self._vocab_size = vocab_size
        self._dtype = DTYPES[dtype_for(vocab_size)]
        self._files: dict[str, BinaryIO] = {}
        self._digests: dict[str, Any] = {}
        self._documents: list[Document] = []
        self._num_buffered = 0
        self._num_tokens = 0
        self._is_masked = False
        with storing(folder):
            self._create("tokens")
            self._create("lengths")

    def add(self, document: Document) -> None:
        """Add a document. Write all documents in memory if they have many tokens."""
        self._documents.append(document)
        self._num_buffered += len(document.tokens)
        if self._num_buffered >= _FLUSH_TOKENS:
            with storing(self._folder):
                self._flush()

    def finish(self) -> dict[str, str]:
        """Close the files, rename them to their final names, and return their hashes."""
        self._flush()
        for ending, file in self._files.items():
            file.close()
            Path(file.name).replace(self._folder / unit_name(self._unit, ending))
        return {ending: digest.hexdigest() for ending, digest in self._digests.items()}

    def abandon(self) -> None:
        """Remove all files that were not renamed by ``finish``."""
        for file in self._files.values():
            file.close()
            Path(file.name).unlink(missing_ok=True)

    def _flush(self) -> None:
        if not self._documents:
            return
        lengths = np.array([len(document.tokens) for document in self._documents], dtype="<i4")
        tokens = np.concatenate([document.tokens for document in self._documents])
        # A cast to uint16 would silently wrap ids that do not fit.
        if len(tokens):
            low = int(tokens.min())
            high = int(tokens.max())
            if low < 0:
                raise beyond_vocabulary(low, self._vocab_size)
            if high >= self._vocab_size:
                raise beyond_vocabulary(high, self._vocab_size)

        # Create the mask file at the first token that does not count in the loss, with ones for all
        # earlier tokens.
        mask = _mask_of(self._documents)
        if mask is not None and not self._is_masked:
            self._is_masked = True
            self._create("learned")
            for at in range(0, self._num_tokens, _BLOCK_BYTES):
                count = min(_BLOCK_BYTES, self._num_tokens - at)
                self._write("learned", np.ones(count, dtype=np.uint8))
        self._write("tokens", tokens.astype(self._dtype))
        self._write("lengths", lengths)
        if self._is_masked:
            if mask is None:
                mask = np.ones(len(tokens), dtype=np.bool_)
            self._write("learned", mask.astype(np.uint8))
        self._num_tokens += len(tokens)
        self._documents = []
        self._num_buffered = 0

    def _create(self, ending: str) -> None:
        # A process that was killed may have left a file of the same unit, so the name contains the process
        # id.
        name = unit_name(self._unit, ending)
        path = self._folder / f"{name}.{os.getpid()}.tmp"
        self._files[ending] = open(path, "wb", buffering=0, opener=atomic_io.open_file)  # noqa: SIM115
        self._digests[ending] = hashlib.sha256()

    def _write(self, ending: str, values: npt.NDArray[Any]) -> None:
        # An empty array cannot be cast.
        content = memoryview(b"")
        if len(values):
            content = np.ascontiguousarray(values).data.cast("B")
        self._digests[ending].update(content)
        # An unbuffered write may write only a part.
        file = self._files[ending]
        while len(content):
            num_written = file.write(content)
            content = content[num_written:]


def _mask_of(documents: list[Document]) -> Mask | None:
    """Return the concatenated masks of documents, or None if all tokens are learned."""
    masks = []
    all_learned = True
    for document in documents:
        mask = document.learned
        if mask is None:
            mask = np.ones(len(document.tokens), dtype=np.bool_)
        elif not mask.all():
            all_learned = False
        masks.append(mask)
    if all_learned:
        return None
    return np.concatenate(masks)


def tally_to_json(tally: RowStats) -> dict[str, Any]:
    """Convert counts to JSON values."""
    table = dict(vars(tally))
    for name, value in table.items():
        if isinstance(value, Counter):
            table[name] = dict(value)
    return table


def tally_from_json(table: Mapping[str, Any]) -> RowStats:
    """Convert counts from JSON values.

    Raises:
        KeyError, TypeError: a key is missing or unknown.
    """
    values = dict(table)
    for name in ("bad", "harmless", "notes"):
        values[name] = Counter(table[name])
    return RowStats(**values)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for content in _blocks(path, 1):
        digest.update(content)
    return digest.hexdigest()


def _blocks(path: Path, item_bytes: int, dtype: np.dtype[Any] | None = None) -> Iterator[bytes]:
    """Yield a file in blocks of about 4 MiB.

    A block has as many values of ``item_bytes`` as values of ``dtype`` fit into 4 MiB, so files with
    different sizes of values can be read in step.
    """
    bytes_per_value = item_bytes
    if dtype is not None:
        bytes_per_value = dtype.itemsize
    num_values = _BLOCK_BYTES // bytes_per_value
    with open(path, "rb", opener=atomic_io.without_waiting) as file:
        while content := file.read(num_values * item_bytes):
            yield content
