"""Sources made of files with one row after the other: any row at once, or in sequence where a file is compressed."""

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
"""One record to a row; must be a function or object that other processes can be sent."""


class Part(Protocol):
    """Rows of one file."""

    @property
    def num_rows(self) -> int:
        """Rows of the file."""
        ...

    def row(self, index: int) -> Row:
        """Row ``index`` of the file."""
        ...

    def place(self, index: int) -> str:
        """Where it is in the file: the line at which it begins, from 1."""
        ...


@dataclass
class RecordsPart:
    """Records of a plain file but for the first ``skipped``, parsed one by one."""

    index: RecordIndex
    parse: Parse
    max_row_bytes: int
    skipped: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of the file."""
        return max(self.index.num_rows - self.skipped, 0)

    def row(self, index: int) -> Row:
        data = self.index.read(index + self.skipped, self.max_row_bytes)
        return data if isinstance(data, BadRow) else self.parse(data)

    def place(self, index: int) -> str:
        return str(self.index.line(index + self.skipped))


@dataclass
class FileTable(FileSource):
    """Rows of several files, one file after the other; see Table."""

    parts: Sequence[Part]

    def __post_init__(self) -> None:
        self._stops = list(accumulate(part.num_rows for part in self.parts))

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        return self._stops[-1]

    def row(self, index: int) -> Row:
        file, number = self._find(index)
        return self.parts[file].row(number)

    def place(self, index: int) -> str:
        """Such as ``data/a.jsonl:17``."""
        file, number = self._find(index)
        return f"{self.members[file].path}:{self.parts[file].place(number)}"

    def _find(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.num_rows:
            raise IndexError(index)
        file = bisect_right(self._stops, index)
        return file, index - (self._stops[file - 1] if file else 0)


@dataclass
class FileShards(FileSource):
    """Rows of several files of which some are compressed, or of many files, a shard each; see Shards.

    ``parts`` holds the files that are had whole, by their number. ``look`` is called with a file when it is opened,
    where files were not looked at before; it gives its rows where the file is had whole, and raises what opening would.
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
        """Files."""
        return len(self.members)

    def rows(self, shard: int, start: int = 0) -> Iterator[Row]:
        """What comes before ``start`` is read and not parsed."""
        part = self._part(shard)
        if part is not None:
            yield from (part.row(number) for number in range(start, part.num_rows))
            return
        for number, record in self._records(shard):
            if number >= start:
                yield record if isinstance(record, BadRow) else self.parse(record)

    def shard_place(self, shard: int, number: int) -> str:
        """A place that was not read yet is searched for from the beginning of its file."""
        part = self._part(shard)
        if part is not None:
            return f"{self.members[shard].path}:{part.place(number)}"
        if shard not in self._lines or self._lines[shard].num_rows <= number:
            for row, _ in self._records(shard):
                if row == number:
                    break
        return f"{self.members[shard].path}:{self._lines[shard].of(number)}"

    def _part(self, shard: int) -> Part | None:
        return self.parts.get(shard) if self.look is None else self.look(self.members[shard])

    def _records(self, shard: int) -> Iterator[tuple[int, bytes | BadRow]]:
        """Rows of a shard with their numbers; notes their lines."""
        lines = self._lines.setdefault(shard, _Lines())
        with open_stream(self.members[shard]) as stream:
            # The first records, such as the line of a table that names its columns, have numbers below 0.
            numbered = records(stream, self.max_row_bytes, quoted=self.quoted)
            for number, (line, record) in enumerate(numbered, start=-self.skipped):
                if number >= 0:
                    lines.note(number, line)
                    yield number, record
                elif isinstance(record, BadRow):
                    raise self.members[shard].unusable(f"cannot be read from its first line on: {record}", "fix it")


class _Lines:
    """Line of each row that was read, kept as the few rows at which their difference changes."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._rows = [0]
        self._shifts = [1]

    def note(self, row: int, line: int) -> None:
        """Take down the line of a row; those before it were noted."""
        if row < self.num_rows:
            return
        self.num_rows = row + 1
        if line - row != self._shifts[-1]:
            self._rows.append(row)
            self._shifts.append(line - row)

    def of(self, row: int) -> int:
        """Line of a row, from 1."""
        return row + self._shifts[bisect_right(self._rows, row) - 1]
