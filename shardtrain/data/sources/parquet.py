"""Parquet files, read by pyarrow: each row group is a shard."""

from __future__ import annotations

import contextlib
import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from shardtrain.data import sandbox, shared_opening
from shardtrain.data.sources import BadRow, Request, Row, Shards, _parquet_footer
from shardtrain.data.sources._batches import rows_of_batch
from shardtrain.data.sources._data_files import File, FileSource, is_many, list_files, place_listed
from shardtrain.data.sources._parquet_pages import BATCH_BYTES, Unclear, memory_of_group
from shardtrain.facts import file_kinds
from shardtrain.utils import bounded_reads, libraries
from shardtrain.utils.errors import ShardtrainError
from shardtrain.utils.hub_errors import describe_error
from shardtrain.utils.limits import is_out_of_memory

ENDINGS = file_kinds.ENDINGS["parquet"]

_ROWS_AT_ONCE = 256
_BOMB_RATIO = 100
_BOMB_BYTES = 64 * 2**20
"""Read a row group in a child process with limits first, if a column is larger than this, and also exceeds
its size on disk by the factor above.
"""
_VALUE_BYTES = 8
_FOOTER_BYTES = 512 * 1024
"""A larger footer is first read in a child process with limits. One byte of it may need 250 bytes of memory."""
_FOOTER_LIST = 10_000
"""Read a footer in a child process first, if it has a list with more entries.

A list may claim any length in a few bytes.
"""
_MAGIC = b"PAR1"
_TAIL_BYTES = 8
"""The last bytes of a file: 4 for the length of the footer, and 4 for the magic number."""
_BUFFER_BYTES = 8 * 2**20


def open_source(request: Request) -> Shards:
    """Open a file, a folder or a pattern, with nested values as Python lists and dicts.

    Raises:
        ConfigError: the option is not set, matches no file, or pyarrow is not installed.
        DataError: a file is not a Parquet file.
    """
    return open_files(list_files(request, "parquet", ENDINGS), request)


def open_files(files: Sequence[File], request: Request) -> Shards:
    """Open files that were already listed, see ``open_source``."""
    _library("pyarrow", files[0])
    if is_many(files):
        return ParquetFiles(files, request.max_row_bytes)

    def look() -> list[list[int]]:
        return [_rows_of_groups(file) for file in files]

    rows = shared_opening.once(place_listed(files), look)
    source = ParquetShards(files, request.max_row_bytes, rows)
    if not source.num_shards:
        raise files[0].unusable("has no rows, and no other file has", "name files with rows")
    return source


@dataclass
class ParquetShards(FileSource):
    """The row groups of files. Each row group is a shard, see ``Shards``.

    ``rows_of_groups`` contains for each file the number of rows in each of its groups.
    """

    max_row_bytes: int
    rows_of_groups: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        self._first_groups = [0, *accumulate(map(len, self.rows_of_groups))]
        # For each group, the number of its first row in its file.
        self._first_rows: list[int] = []
        for rows in self.rows_of_groups:
            if rows:
                self._first_rows += accumulate(rows[:-1], initial=0)
        self.num_shards = self._first_groups.pop()
        self._footers: dict[str, Any] = {}

    def rows(self, shard: int, start: int = 0) -> Iterator[Row]:
        file, group = self._find(shard)
        with _open(file, self._footers.get(file.path)) as parquet:
            # Keep the footer of this file.
            # If a large footer were parsed for each row group, this would take hours.
            self._footers = {file.path: parquet.metadata}
            yield from _rows_of_group(file, parquet, group, start, self.max_row_bytes)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_footers": {}}

    def shard_place(self, shard: int, number: int) -> str:
        """Return the location of a row, counted from 0 over the file like in most tools."""
        file, _ = self._find(shard)
        return f"{file.path}: row {self._first_rows[shard] + number} from 0"

    def _find(self, shard: int) -> tuple[File, int]:
        index = bisect_right(self._first_groups, shard) - 1
        return self.members[index], shard - self._first_groups[index]


@dataclass
class ParquetFiles(FileSource):
    """Many files, each of which is a shard, see ``Shards``. A file is opened only when its rows are read."""

    max_row_bytes: int

    @property
    def num_shards(self) -> int:
        """Number of files."""
        return len(self.members)

    def rows(self, shard: int, start: int = 0) -> Iterator[Row]:
        file = self.members[shard]
        before = 0
        with _open(file) as parquet:
            _check(file, parquet)
            for group in range(parquet.metadata.num_row_groups):
                count = parquet.metadata.row_group(group).num_rows
                if before + count > start:
                    yield from _rows_of_group(
                        file, parquet, group, max(start - before, 0), self.max_row_bytes
                    )
                before += count

    def shard_place(self, shard: int, number: int) -> str:
        return f"{self.members[shard].path}: row {number} from 0"


def _rows_of_groups(file: File) -> list[int]:
    """Return the number of rows of each row group. Raises DataError if the footer cannot be read."""
    with _open(file) as parquet:
        _check(file, parquet)
        groups = range(parquet.metadata.num_row_groups)
        return [parquet.metadata.row_group(group).num_rows for group in groups]


def _check(file: File, parquet: Any) -> None:
    """Raise DataError if the file cannot be used as data."""
    _prove(file, parquet)
    names = parquet.schema_arrow.names
    if len(set(names)) < len(names):
        raise file.unusable("has two columns with the same name", "rename one of them")


def _rows_of_group(
    file: File, parquet: Any, group: int, start: int, max_row_bytes: int
) -> Iterator[Row]:
    """Yield the rows of a row group, starting at number ``start``."""
    arrow = _library("pyarrow", file)
    meta = parquet.metadata.row_group(group)
    try:
        many = _rows_within_limits(file, parquet, group)
    except sandbox.Failed:
        # Do not decode it here, where no limits hold.
        yield BadRow("the rest of the row group is damaged")
        return
    if sum(_sizes(meta, number)[0] for number in range(meta.num_columns)) > BATCH_BYTES:
        # Read through a buffer, because otherwise Arrow would read complete column chunks into memory.
        parquet = _open(file, parquet.metadata, buffer_size=_BUFFER_BYTES)
    batches = parquet.iter_batches(batch_size=many, row_groups=[group], use_threads=False)
    passed = 0
    while True:
        try:
            batch = next(batches, None)
        except (OSError, arrow.ArrowException) as error:
            # Missing memory and failing storage do not damage the file.
            if is_out_of_memory(error):
                raise
            trouble = (
                bounded_reads.trouble(file.path, error) if isinstance(error, OSError) else None
            )
            if trouble is not None:
                raise trouble from error
            yield BadRow("the rest of the row group is damaged")
            return
        if batch is None:
            return
        if passed + batch.num_rows > start:
            yield from rows_of_batch(batch.slice(max(start - passed, 0)), max_row_bytes)
        passed += batch.num_rows


def _rows_within_limits(file: File, parquet: Any, group: int) -> int:
    """Return the number of rows of a row group to decode together.

    Raises:
        DataError: decoding them exceeds the limits of ``sandbox``.
        Failed: the row group is damaged.
    """
    limits = sandbox.limits()
    meta = parquet.metadata.row_group(group)
    many = _rows_at_once(meta)
    descriptor = file.open()
    try:
        memory = memory_of_group(descriptor, parquet, meta, limits.seconds)
        if not memory.is_suspicious(limits.memory_bytes):
            return memory.rows_at_once
        many = min(many, memory.rows_at_once)
    except Unclear:
        pass
    except OSError as error:
        raise file.unreadable(error) from error
    finally:
        os.close(descriptor)
    _try(file, [group], many)
    return many


def _rows_at_once(group: Any) -> int:
    """Return the number of rows to read together, which fit into memory according to the sizes in the footer."""
    sizes = (group.column(number).total_uncompressed_size for number in range(group.num_columns))
    size = max(group.total_byte_size, *sizes, 1)
    return max(1, min(_ROWS_AT_ONCE, BATCH_BYTES // size))


def _sizes(group: Any, number: int) -> tuple[int, int]:
    """Return a column's size on disk, and its minimum size after decoding. Null values need memory too."""
    column = group.column(number)
    return max(column.total_compressed_size, 1), max(
        column.total_uncompressed_size, _VALUE_BYTES * column.num_values
    )


def _prove(file: File, parquet: Any) -> None:
    """Read row groups that grow too much, according to the footer, in a child process with limits.

    Groups with contradicting page headers are found when they are read. Raises DataError.
    """
    suspects = suspicious_groups(parquet.metadata)
    if not suspects:
        return
    # A damaged group is a bad row. Each of the others is tried again before it is read, if its pages grow.
    with contextlib.suppress(sandbox.Failed):
        _try(file, list(suspects), max(suspects.values()))


def suspicious_groups(meta: Any) -> dict[int, int]:
    """Map each row group that grows too much, according to the footer, to the number of rows to read together."""
    suspects = {}
    for number in range(meta.num_row_groups):
        group = meta.row_group(number)
        for column in range(group.num_columns):
            compressed, decoded = _sizes(group, column)
            if decoded > max(_BOMB_BYTES, _BOMB_RATIO * compressed):
                suspects[number] = _rows_at_once(group)
                break
    return suspects


def _try(file: File, groups: Sequence[int], rows_at_once: int) -> None:
    """Read row groups, or the footer if ``groups`` is empty, in a child process.

    Raises:
        DataError: they exceed the limits of ``sandbox``, or the footer cannot be read.
        Failed: a row group is damaged.
    """
    path = os.path.abspath(file.path)
    identity = f"{path} {file.size} {file.mtime_ns} {file.inode}"
    keys = [f"{identity} {group}" for group in groups]
    if not groups:
        keys = [f"{identity} footer"]
    request = {"path": path, "groups": groups, "rows": rows_at_once, "max_list": file.size}
    try:
        sandbox.open_in_child("parquet", request, *keys)
    except sandbox.Failed as failed:
        error = OSError(failed.errno, failed.lines[0])
        trouble = bounded_reads.trouble(file.path, error)
        if groups and trouble is None:
            raise
        raise trouble or _not_parquet(file, error, failed.lines[0]) from None
    except sandbox.Refused as refused:
        fix = refused.fix or "get the file from its source again, remove it, or raise the limit"
        raise file.unusable(str(refused), fix) from None


def _open(file: File, metadata: Any = None, buffer_size: int = 0) -> Any:
    """Open a file. If it was opened before, pass its ``metadata``, because reading the footer takes time.

    Raises:
        ConfigError: the file has changed.
        DataError: its footer cannot be read, or exceeds the limits of ``sandbox``.
    """
    file.check_unchanged()
    parquet = _library("pyarrow.parquet", file)
    arrow = _library("pyarrow", file)
    try:
        if metadata is not None:
            return parquet.ParquetFile(file.path, metadata=metadata, buffer_size=buffer_size)
        # Read a footer in a child process first if it is large, has long lists, or could end the process.
        footer = _footer(file)
        if len(footer) <= _FOOTER_BYTES:
            try:
                opened = parquet.ParquetFile(file.path, thrift_container_size_limit=_FOOTER_LIST)
            except OSError as error:
                if "size limit" not in str(error):
                    raise
            else:
                if _can_describe(footer, opened.schema):
                    return opened
        _try(file, [], 1)
        return parquet.ParquetFile(file.path, **thrift_limits(file.size))
    except UnicodeDecodeError as error:
        raise _not_parquet(file, error, "the name of a column is not UTF-8 text") from error
    except (OSError, arrow.ArrowException) as error:
        raise _not_parquet(file, error, describe_error(error)) from error


def _not_parquet(file: File, error: Exception, reason: str) -> ShardtrainError:
    """Return the error for a file that cannot be decoded. It is a StorageError if storage failed."""
    trouble = bounded_reads.trouble(file.path, error) if isinstance(error, OSError) else None
    return trouble or file.unusable(
        f"cannot be read as Parquet ({reason})", "get the file again, or remove it"
    )


def thrift_limits(file_bytes: int) -> dict[str, int]:
    """Return pyarrow's limits for a footer. A list or a text in it cannot be longer than the file."""
    limit = min(file_bytes, 2**31 - 1)
    return {"thrift_container_size_limit": limit, "thrift_string_size_limit": limit}


def _footer(file: File) -> bytes:
    """Return the footer, or its first ``_FOOTER_BYTES`` + 1 bytes.

    Empty if the file does not end like a Parquet file.
    """
    descriptor = file.open()
    try:
        tail = os.pread(descriptor, _TAIL_BYTES, max(file.size - _TAIL_BYTES, 0))
        if not tail.endswith(_MAGIC):
            return b""
        length = int.from_bytes(tail[:4], "little")
        begin = max(file.size - _TAIL_BYTES - length, 0)
        return os.pread(descriptor, min(length, _FOOTER_BYTES + 1), begin)
    finally:
        os.close(descriptor)


_described: set[bytes] = set()
"""Hashes of footers that pyarrow can describe. A file is opened again for each of its row groups."""


def _can_describe(footer: bytes, schema: Any) -> bool:
    """True if pyarrow can certainly describe each column chunk of a footer."""
    digest = hashlib.sha256(footer).digest()
    if digest not in _described and _parquet_footer.can_describe(footer, schema):
        _described.add(digest)
    return digest in _described


def _library(name: str, file: File) -> Any:
    return libraries.load(name, file.option, file.path)
