"""Index of the records in a plain text file. After one scan in bounded memory, any record can be read."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtrain.data.sources import BadRow, Request
from shardtrain.data.sources._data_files import File
from shardtrain.utils.errors import DataError
from shardtrain.utils.units import format_bytes

# Blocks must be small. A file may consist of only newlines, and each newline takes several numbers in memory.
_BLOCK_BYTES = 4 * 2**20
_GAPS = ("gap_rows", "gap_starts", "gap_blanks")
_NEWLINE = 10
_QUOTE = 34
_RETURN = 13
_SPACE = 32
_TAB = 9
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BLANKS = b" \t\r"
"""A line that consists of these characters is blank. Blank lines are not rows."""
UNENDED_BYTES = 2**28
"""A plain file is refused at a record that is longer than this and than twice the maximum row size.

A record of more than ``data.max_row_bytes`` is a bad row, which a run may skip. A record without an end is no
row: a sparse file of 4 TiB takes an hour to read.
"""


class RecordReader:
    """Reads any part of files, and keeps the last files open. Not thread-safe."""

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._open: OrderedDict[str, int] = OrderedDict()

    def read(self, file: File, size: int, offset: int) -> bytes:
        """Return ``size`` bytes, starting at ``offset``.

        Raises:
            ConfigError: the file has changed since it was listed.
            DataError: the file cannot be read.
        """
        descriptor = self._open.get(file.path)
        if descriptor is None:
            descriptor = file.open()
            self._open[file.path] = descriptor
            # Close the least recently used file.
            if len(self._open) > self._capacity:
                _, oldest = self._open.popitem(last=False)
                os.close(oldest)
        else:
            self._open.move_to_end(file.path)
        try:
            data = os.pread(descriptor, size, offset)
        except OSError as error:
            raise file.unreadable(error) from error
        # Continue a partial read. A signal may have interrupted it, or the file may have been truncated.
        while len(data) < size:
            more = os.pread(descriptor, size - len(data), offset + len(data))
            if not more:
                file.check_unchanged()
                raise file.unusable("ends before its size", "check the disk")
            data += more
        return data

    # A worker process opens its own files.
    def __getstate__(self) -> dict[str, Any]:
        return {"_capacity": self._capacity, "_open": OrderedDict()}

    # Keep a reference to os.close, because the module os may be None when the process ends.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        for descriptor in self._open.values():
            close(descriptor)


class RecordIndex:
    """The starts and the line numbers of the records of a file.

    It needs 8 bytes of memory per row, and 24 per run of blank records. A record is a line. With
    ``quoted``, a record ends at the next newline outside double quotes, as in CSV. Blank records are not
    rows. A byte order mark at the start is skipped, and the last line needs no newline.
    """

    def __init__(
        self,
        file: File,
        reader: RecordReader,
        arrays: Mapping[str, Any] | None = None,
        *,
        quoted: bool = False,
        max_row_bytes: int = Request.max_row_bytes,
    ) -> None:
        """Scan the file, or use ``arrays``, the result of a scan on another rank.

        Raises:
            DataError: a record has no end within ``longest_skipped(max_row_bytes)``.
        """
        self.file = file
        self._reader = reader
        self._longest = longest_skipped(max_row_bytes)
        if arrays is None:
            arrays = self._find(quoted)
        self._starts = arrays["starts"]
        self._lines = arrays.get("lines")
        self._gap_rows, self._gap_starts, self._gap_blanks = (arrays[name] for name in _GAPS)
        self.num_rows = len(self._starts) - 1

    def arrays(self) -> dict[str, npt.NDArray[np.int64]]:
        """Return the result of the scan."""
        gaps = (self._gap_rows, self._gap_starts, self._gap_blanks)
        result = {"starts": self._starts, **dict(zip(_GAPS, gaps, strict=True))}
        if self._lines is not None:
            result["lines"] = self._lines
        return result

    def _find(self, quoted: bool) -> dict[str, npt.NDArray[np.int64]]:
        """Scan the file. Return the starts of rows, and three numbers for each run of blank records.

        These are the number of rows before the run, its start, and the number of all blank records up to its
        end.
        """
        none = np.array([], np.int64)
        starts = [none]
        lines = [none]
        gaps = [np.zeros((3, 0), np.int64)]
        rows = 0
        for block_starts, block_lines, blank in self._scan(quoted):
            starts.append(block_starts[~blank])
            # Without quotes, records are lines, so line numbers need not be stored.
            if quoted:
                lines.append(block_lines[~blank])
            # Consecutive blank records have the same number of rows before them, so they are one run.
            if blank.any():
                rows_before = rows + np.cumsum(~blank)[blank]
                runs, first_blank, counts = np.unique(
                    rows_before, return_index=True, return_counts=True
                )
                starts_of_runs = block_starts[blank][first_blank]
                gaps.append(np.stack([runs, starts_of_runs, counts]))
            rows += len(starts[-1])
        # The end of the file ends the last row.
        starts.append(np.array([self.file.size]))
        result = {"starts": np.concatenate(starts)}
        merged_gaps = _merge_gaps(*np.concatenate(gaps, axis=1))
        result |= dict(zip(_GAPS, merged_gaps, strict=True))
        if quoted:
            result["lines"] = np.concatenate(lines)
        return result

    def line(self, row: int) -> int:
        """Return the line at which a row begins, from 1."""
        if self._lines is not None:
            return 1 + int(self._lines[row])
        # Without quotes, only blank records make a line number larger than the number of the row.
        gaps = int(self._gap_rows.searchsorted(row, side="right"))
        blanks = 0
        if gaps:
            blanks = int(self._gap_blanks[gaps - 1])
        return 1 + row + blanks

    def read(self, row: int, max_bytes: int) -> bytes | BadRow:
        """Return the bytes of a row without its newline. A row longer than ``max_bytes`` is not read."""
        # A row ends where the next row begins, or where blank records before the next row begin.
        start = int(self._starts[row])
        stop = int(self._starts[row + 1])
        gap = 0
        if len(self._gap_rows):
            gap = int(self._gap_rows.searchsorted(row + 1))
        if gap < len(self._gap_rows) and self._gap_rows[gap] == row + 1:
            stop = int(self._gap_starts[gap])
        num_bytes = stop - start
        # The newline does not count.
        if num_bytes > max_bytes + 1:
            ends_with_newline = self._reader.read(self.file, 1, stop - 1) == b"\n"
            return too_long(num_bytes - ends_with_newline)
        data = self._reader.read(self.file, num_bytes, start).removesuffix(b"\n")
        if len(data) > max_bytes:
            return too_long(len(data))
        return data

    def _scan(
        self, quoted: bool
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]]:
        """Yield for each block of the file three arrays about the records that begin in it.

        They are the records' offsets, their line numbers (from 0), and a mask that is True for blank records.
        """
        size = self.file.size
        head = self._reader.read(self.file, min(3, size), 0)
        # The start of the next record to return: after the byte order mark, if the file has one.
        pending = 0
        if head == BYTE_ORDER_MARK:
            pending = len(BYTE_ORDER_MARK)
        pending_line = 0
        lines = 0
        quotes = 0
        last_start = pending
        last_line = 0
        for base in range(0, size, _BLOCK_BYTES):
            count = min(_BLOCK_BYTES, size - base)
            block = np.frombuffer(self._reader.read(self.file, count, base), dtype=np.uint8)
            newlines = np.flatnonzero(block == _NEWLINE)
            numbers = np.arange(lines + 1, lines + 1 + len(newlines))
            lines += len(newlines)
            # A newline after an odd number of quotes is inside a value. An escaped quote is doubled, so it
            # does not change whether the number is odd.
            if quoted:
                marks = np.flatnonzero(block == _QUOTE)
                outside = (marks.searchsorted(newlines) + quotes) % 2 == 0
                newlines = newlines[outside]
                numbers = numbers[outside]
                quotes += len(marks)
            # A record begins after each newline. The first record of the block may begin at its first byte.
            starts = newlines + (base + 1)
            if base <= pending < base + count:
                starts = np.concatenate([[pending], starts])
                numbers = np.concatenate([[pending_line], numbers])
            # If the last record begins at the first byte of the next block, it belongs to that block.
            if len(starts) and starts[-1] == base + count:
                pending = int(starts[-1])
                pending_line = int(numbers[-1])
                starts = starts[:-1]
                numbers = numbers[:-1]
            yield starts, numbers, self._blank(block, base, starts)
            # The last record continues in the next block. Refuse the file if the record has no end.
            if len(starts):
                last_start = int(starts[-1])
                last_line = int(numbers[-1])
            end = base + count
            if pending < end and end - last_start > self._longest:
                raise self._unended(last_line, quoted)

    def _unended(self, line: int, quoted: bool) -> DataError:
        """Return the error for a record without an end. ``line`` is its line, from 0."""
        rule = (
            f"has a row at line {line + 1} that does not end within {format_bytes(self._longest)}"
        )
        fix = "end each row with a newline, or remove the file if it is no text"
        if quoted:
            fix = (
                "close its quotes, end each row with a newline, or remove the file if it is no text"
            )
        return self.file.unusable(rule, fix)

    def _blank(
        self, block: npt.NDArray[np.uint8], base: int, starts: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Return a mask of the blank records among those that begin in a block."""
        first = block[starts - base]
        blank = first == _NEWLINE
        # A record that begins with whitespace is blank if there is nothing else before its newline.
        doubtful = np.flatnonzero(_is_space(first))
        if len(doubtful):
            solid = np.flatnonzero(~_is_space(block))
            following = solid.searchsorted(starts[doubtful] - base)
            is_in_block = following < len(solid)
            next_solid = solid[following[is_in_block]]
            blank[doubtful[is_in_block]] = block[next_solid] == _NEWLINE
            # The line of such a record may end in the next block, so read it.
            for index in doubtful[~is_in_block]:
                blank[index] = self._is_blank(int(starts[index]))
        return blank

    def _is_blank(self, start: int) -> bool:
        """True if a record contains only whitespace before its newline."""
        # Most such lines are short. Only a long one needs a large read.
        size = 64
        stop = min(self.file.size, start + self._longest)
        while start < stop:
            count = min(size, stop - start)
            rest = self._reader.read(self.file, count, start).lstrip(BLANKS)
            if rest:
                return rest[0] == _NEWLINE
            start += count
            size = _BLOCK_BYTES
        return True


def _is_space(characters: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Return a mask of the characters in ``BLANKS``."""
    # Three comparisons are several times faster than ``np.isin``.
    return (characters == _SPACE) | (characters == _TAB) | (characters == _RETURN)


def _merge_gaps(
    rows_before: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Merge the parts of each run of blank records, and replace their counts by cumulative ones.

    A run that crosses blocks has one part in each block. All its parts have the same number of rows before them.

    >>> rows, starts, blanks = _merge_gaps(np.array([3, 3, 8]), np.array([40, 64, 99]), np.array([2, 5, 1]))
    >>> rows.tolist(), starts.tolist(), blanks.tolist()
    ([3, 8], [40, 99], [7, 8])
    """
    if not len(counts):
        return rows_before, starts, counts
    is_first_part = np.diff(rows_before, prepend=-1) > 0
    next_runs = np.flatnonzero(is_first_part)[1:]
    last_parts = np.append(next_runs, len(counts)) - 1
    blanks = np.cumsum(counts)[last_parts]
    return rows_before[is_first_part], starts[is_first_part], blanks


def longest_skipped(max_row_bytes: int) -> int:
    """Return the size from which a record of a plain file is refused instead of skipped."""
    return max(UNENDED_BYTES, 2 * max_row_bytes)


def too_long(num_bytes: int) -> BadRow:
    """Return the bad row for a row that is too long to read."""
    return BadRow("is longer than data.max_row_bytes", detail=f"{num_bytes} bytes")
