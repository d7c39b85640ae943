"""Parquet files, read by pyarrow: each row group is a shard."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from shardtrain.data import sandbox, shared_opening
from shardtrain.data.sources import BadRow, Request, Row, Shards
from shardtrain.data.sources._batches import rows_of_batch
from shardtrain.data.sources._data_files import File, FileSource, is_many, list_files, place_listed
from shardtrain.facts import file_kinds
from shardtrain.utils import bounded_reads, libraries

ENDINGS = file_kinds.ENDINGS["parquet"]

_ROWS_AT_ONCE = 256
_BYTES_AT_ONCE = 256 * 2**20
"""Maximum memory of rows that are decoded at once. Each row may be as large as its row group claims."""
_BOMB_RATIO = 100
_BOMB_BYTES = 64 * 2**20
"""Columns that claim to be this many times larger than on disk are first read in a process with limits."""
_VALUE_BYTES = 8
_SMALL_BYTES = 64 * 1024
_DENSE = ("ZSTD", "GZIP", "BROTLI")
"""Codecs that can compress a thousand bytes into one.

Small files with these codecs are always tried first.
"""


def open_source(request: Request) -> Shards:
    """Open a file, a folder or a pattern, with nested values as Python lists and dicts.

    Raises:
        ConfigError: the option is not set, matches no file, or pyarrow is not installed.
        DataError: a file is not a Parquet file.
    """
    return open_files(list_files(request, "parquet", ENDINGS), request)


def open_files(files: Sequence[File], request: Request) -> Shards:
    """As open_source, for files that were found already."""
    _library("pyarrow", files[0])
    if is_many(files):
        return ParquetFiles(files, request.max_row_bytes)
    rows = shared_opening.once(
        place_listed(files), lambda: [_rows_of_groups(file) for file in files]
    )
    source = ParquetShards(files, request.max_row_bytes, rows)
    if not source.num_shards:
        raise files[0].unusable("has no rows, and no other file has", "name files with rows")
    return source


@dataclass
class ParquetShards(FileSource):
    """Row groups of files, one shard each; see Shards.

    ``rows_of_groups`` has the number of rows of each group of each file.
    """

    max_row_bytes: int
    rows_of_groups: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        self._first_groups = [0, *accumulate(map(len, self.rows_of_groups))]
        # The number of the first row of each group in its file.
        self._first_rows: list[int] = []
        for rows in self.rows_of_groups:
            if rows:
                self._first_rows += accumulate(rows[:-1], initial=0)
        self.num_shards = self._first_groups.pop()

    def rows(self, shard: int, start: int = 0) -> Iterator[Row]:
        file, group = self._find(shard)
        with _open(file) as parquet:
            yield from _rows_of_group(file, parquet, group, start, self.max_row_bytes)

    def shard_place(self, shard: int, number: int) -> str:
        """Return the location of a row, counted from 0 over the file, like most tools that display such
        files."""
        file, _ = self._find(shard)
        return f"{file.path}: row {self._first_rows[shard] + number} from 0"

    def _find(self, shard: int) -> tuple[File, int]:
        index = bisect_right(self._first_groups, shard) - 1
        return self.members[index], shard - self._first_groups[index]


@dataclass
class ParquetFiles(FileSource):
    """Many files, one shard each, that are opened only when a row is read; see Shards."""

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
    many = _rows_at_once(parquet.metadata.row_group(group))
    batches = parquet.iter_batches(batch_size=many, row_groups=[group], use_threads=False)
    passed = 0
    while True:
        try:
            batch = next(batches, None)
        except (OSError, arrow.ArrowException):
            yield BadRow("the rest of the row group is damaged")
            return
        if batch is None:
            return
        if passed + batch.num_rows > start:
            yield from rows_of_batch(batch.slice(max(start - passed, 0)), max_row_bytes)
        passed += batch.num_rows


def _rows_at_once(group: Any) -> int:
    """Return the number of rows to read at once, to limit memory."""
    sizes = (group.column(number).total_uncompressed_size for number in range(group.num_columns))
    size = max(group.total_byte_size, *sizes, 1)
    return max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE // size))


def _sizes(group: Any, number: int) -> tuple[int, int]:
    """Return the size on disk, and the minimum size after decoding: null values also take a level and a
    place."""
    column = group.column(number)
    return max(column.total_compressed_size, 1), max(
        column.total_uncompressed_size, _VALUE_BYTES * column.num_values
    )


def _prove(file: File, parquet: Any) -> None:
    """Read suspicious row groups in a child process with limits. Raises DataError if that fails."""
    # from the footer: columns that expand too much, or small files with a codec whose sizes cannot be
    # trusted
    meta = parquet.metadata
    groups = [meta.row_group(number) for number in range(meta.num_row_groups)]
    suspects = []
    for number, group in enumerate(groups):
        pairs = [_sizes(group, column) for column in range(group.num_columns)]
        is_dense = any(
            group.column(column).compression in _DENSE for column in range(group.num_columns)
        )
        grows = any(large > _BOMB_BYTES and large > _BOMB_RATIO * small for small, large in pairs)
        if grows or (is_dense and file.size <= _SMALL_BYTES):
            suspects.append(number)
    if not suspects:
        return
    request = {
        "path": os.path.abspath(file.path),
        "groups": suspects,
        "rows": min(_rows_at_once(groups[number]) for number in suspects),
    }
    try:
        sandbox.prove(
            "parquet", request, f"{request['path']} {file.size} {file.mtime_ns} {file.inode}"
        )
    except sandbox.Refused as refused:
        raise file.unusable(
            str(refused), "get the file from its source again, or remove it"
        ) from None


def _open(file: File) -> Any:
    file.check_unchanged()
    parquet = _library("pyarrow.parquet", file)
    arrow = _library("pyarrow", file)
    try:
        return parquet.ParquetFile(file.path)
    except (OSError, arrow.ArrowException) as error:
        trouble = bounded_reads.trouble(file.path, error) if isinstance(error, OSError) else None
        if trouble is not None:
            raise trouble from error
        reason = str(error).splitlines()[0]
        raise file.unusable(
            f"cannot be read as Parquet ({reason})", "get the file again, or remove it"
        ) from error


def _library(name: str, file: File) -> Any:
    return libraries.load(name, file.option, file.path)
