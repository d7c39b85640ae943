"""Sources that consist of files. Rows can be read in any order, or only in sequence if a file is compressed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from shardtrain.data.sources import BadRow, Row
from shardtrain.data.sources._compressed import open_stream
from shardtrain.data.sources._data_files import File, FileSource
from shardtrain.data.sources._index import RecordIndex
from shardtrain.data.sources._records import records

Parse = Callable[[bytes], Row]
"""A function that converts a record to a row. It must be picklable."""


class Part(Protocol):
    """Interface of the rows of one file."""

    @property
    def num_rows(self) -> int:
        """Number of rows in the file."""
        ...

    def row(self, index: int) -> Row:
        """Return row ``index`` of the file."""
        ...

    def place(self, index: int) -> str:
        """Return the location of a row in the file, such as the line (from 1) at which it begins."""
        ...


@dataclass
class RecordsPart:
    """The records of a plain file without the first ``skipped`` records. Each record is parsed when it is read."""

    index: RecordIndex
    parse: Parse
    max_row_bytes: int
    skipped: int = 0

    @property
    def num_rows(self) -> int:
        """Number of rows in the file."""
        return max(self.index.num_rows - self.skipped, 0)

    def row(self, index: int) -> Row:
        data = self.index.read(index + self.skipped, self.max_row_bytes)
        if isinstance(data, BadRow):
            return data
        return self.parse(data)

    def place(self, index: int) -> str:
        return str(self.index.line(index + self.skipped))


@dataclass
class FileTable(FileSource):
    """The rows of several files, one file after the other, see ``Table``."""

    parts: Sequence[Part]

    def __post_init__(self) -> None:
        self._stops = list(accumulate(part.num_rows for part in self.parts))

    @property
    def num_rows(self) -> int:
        """Number of rows in all files."""
        return self._stops[-1]

    def row(self, index: int) -> Row:
        file, number = self._find(index)
        return self.parts[file].row(number)

    def place(self, index: int) -> str:
        """Return the location of a row, such as ``data/a.jsonl:17``."""
        file, number = self._find(index)
        return f"{self.members[file].path}:{self.parts[file].place(number)}"

    def _find(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.num_rows:
            raise IndexError(index)
        # Find the first file that ends after the row. ``bisect_right`` skips files without rows.
        file = bisect_right(self._stops, index)
        rows_before = 0
        if file:
            rows_before = self._stops[file - 1]
        return file, index - rows_before


@dataclass
class FileShards(FileSource):
    """The rows of many files, or of files of which some are compressed. Each file is a shard, see ``Shards``.

    Attributes:
        parts: maps file numbers to rows, for files whose rows can be read in any order.
        look: used instead of ``parts`` if there are many files. It is called when a file is opened, checks
            the file, and returns its rows if they can be read in any order.
    """

    parse: Parse
    max_row_bytes: int
    skipped: int = 0
    quoted: bool = False
    parts: dict[int, Part] = field(default_factory=dict)
    look: Callable[[File], Part | None] | None = None
    _lines: dict[int, _Lines] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_shards(self) -> int:
        """Number of files."""
        return len(self.members)

    def rows(self, shard: int, start: int = 0) -> Iterator[Row]:
        """Yield the rows of a file. Rows before ``start`` are read but not parsed."""
        part = self._part(shard)
        if part is not None:
            yield from (part.row(number) for number in range(start, part.num_rows))
            return
        # A compressed file can only be read from its beginning.
        for number, record in self._records(shard):
            if number < start:
                continue
            if isinstance(record, BadRow):
                yield record
            else:
                yield self.parse(record)

    def shard_place(self, shard: int, number: int) -> str:
        """Return the location of a row. If it was not read yet, search the file from its beginning."""
        part = self._part(shard)
        if part is not None:
            return f"{self.members[shard].path}:{part.place(number)}"
        # Reading the records notes their lines.
        if shard not in self._lines or self._lines[shard].num_rows <= number:
            for row, _ in self._records(shard):
                if row == number:
                    break
        return f"{self.members[shard].path}:{self._lines[shard].of(number)}"

    def _part(self, shard: int) -> Part | None:
        """Return the rows of a file if they can be read in any order, or None."""
        if self.look is None:
            return self.parts.get(shard)
        return self.look(self.members[shard])

    def _records(self, shard: int) -> Iterator[tuple[int, bytes | BadRow]]:
        """Yield the records of a file with their numbers, and remember their lines."""
        lines = self._lines.setdefault(shard, _Lines())
        with open_stream(self.members[shard]) as stream:
            # Records to skip, such as the line with the column names, get numbers below 0.
            numbered = records(stream, self.max_row_bytes, quoted=self.quoted)
            for number, (line, record) in enumerate(numbered, start=-self.skipped):
                if number >= 0:
                    lines.note(number, line)
                    yield number, record
                elif isinstance(record, BadRow):
                    rule = f"cannot be read from its first line on: {record}"
                    raise self.members[shard].unusable(rule, "correct the line")


class _Lines:
    """The line numbers of the rows that were read.

    It stores only the few rows at which the difference between row and line number changes.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self._rows = [0]
        self._shifts = [1]

    def note(self, row: int, line: int) -> None:
        """Store the line of a row. Earlier rows were stored before."""
        if row < self.num_rows:
            return
        self.num_rows = row + 1
        if line - row != self._shifts[-1]:
            self._rows.append(row)
            self._shifts.append(line - row)

    def of(self, row: int) -> int:
        """Return the line of a row, from 1."""
        # The last change at or before the row applies to it.
        change = bisect_right(self._rows, row) - 1
        return row + self._shifts[change]
