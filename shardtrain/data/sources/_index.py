"""Where each record of a plain text file begins: one scan in bounded memory, then any record at once."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtrain.data.sources import BadRow
from shardtrain.data.sources._data_files import File

_BLOCK_BYTES = 4 * 2**20  # of newlines alone, each of which takes some numbers
_GAPS = ("gap_rows", "gap_starts", "gap_blanks")
_NEWLINE = 10
_QUOTE = 34
_RETURN = 13
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BLANKS = b" \t\r"
"""What a blank line may have; such a line is not a row."""


class RecordReader:
    """Reads any part of files, and keeps the last of them open. Not for several threads."""

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._open: OrderedDict[str, int] = OrderedDict()

    def read(self, file: File, size: int, offset: int) -> bytes:
        """Return ``size`` bytes from ``offset`` on.

        Raises:
            ConfigError: when the file changed since it was listed.
            DataError: when it cannot be read.
        """
        descriptor = self._open.get(file.path)
        if descriptor is None:
            descriptor = self._open[file.path] = file.open()
            if len(self._open) > self._capacity:
                os.close(self._open.popitem(last=False)[1])
        else:
            self._open.move_to_end(file.path)
        try:
            data = os.pread(descriptor, size, offset)
        except OSError as error:
            raise file.unreadable(error) from error
        while len(data) < size:  # a signal cut the read short, or somebody the file
            more = os.pread(descriptor, size - len(data), offset + len(data))
            if not more:
                file.check_unchanged()
                raise file.unusable("ends before its size", "check the disk")
            data += more
        return data

    def __getstate__(self) -> dict[str, Any]:
        return {"_capacity": self._capacity, "_open": OrderedDict()}

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # os may be gone when the process ends
        for descriptor in self._open.values():
            close(descriptor)


class RecordIndex:
    """Records of a file, and their lines; 8 bytes a row, and 24 for each run of blank records.

    A record is a line, or with ``quoted`` the lines up to the next newline outside double quotes, as in CSV. Blank
    records are not rows. A byte order mark at the head is left out; a last line needs no newline.
    """

    def __init__(
        self, file: File, reader: RecordReader, arrays: Mapping[str, Any] | None = None, *, quoted: bool = False
    ) -> None:
        """``arrays`` is what ``arrays`` gave on another rank, and spares the scan."""
        self.file = file
        self._reader = reader
        if arrays is None:
            arrays = self._find(quoted)
        self._starts = arrays["starts"]
        self._lines = arrays.get("lines")
        self._gap_rows, self._gap_starts, self._gap_blanks = (arrays[name] for name in _GAPS)
        self.num_rows = len(self._starts) - 1

    def arrays(self) -> dict[str, npt.NDArray[np.int64]]:
        """What the scan found."""
        gaps = (self._gap_rows, self._gap_starts, self._gap_blanks)
        result = {"starts": self._starts, **dict(zip(_GAPS, gaps, strict=True))}
        return result if self._lines is None else {**result, "lines": self._lines}

    def _find(self, quoted: bool) -> dict[str, npt.NDArray[np.int64]]:
        """Where rows start and, for each run of blank records, the rows before it, its start, and all blanks so far."""
        none = np.array([], np.int64)
        starts = [none]
        lines = [none]
        gaps = [np.zeros((3, 0), np.int64)]
        rows = 0
        for block_starts, block_lines, blank in self._scan(quoted):
            starts.append(block_starts[~blank])
            if quoted:  # without quotes, records are lines
                lines.append(block_lines[~blank])
            if blank.any():
                before = rows + np.cumsum(~blank)[blank]
                first, at, counts = np.unique(before, return_index=True, return_counts=True)
                gaps.append(np.stack([first, block_starts[blank][at], counts]))
            rows += len(starts[-1])
        # A run of blank records that crosses blocks was result once in each: it is new where a row came before it.
        gap_rows, gap_starts, counts = np.concatenate(gaps, axis=1)
        is_new = np.diff(gap_rows, prepend=-1) > 0
        blanks = np.cumsum(counts)[np.append(np.flatnonzero(is_new)[1:], len(counts)) - 1] if len(counts) else none
        result = {"starts": np.concatenate([*starts, np.array([self.file.size])])}
        result |= dict(zip(_GAPS, (gap_rows[is_new], gap_starts[is_new], blanks), strict=True))
        return {**result, "lines": np.concatenate(lines)} if quoted else result

    def line(self, row: int) -> int:
        """Line at which a row begins, from 1."""
        if self._lines is not None:
            return 1 + int(self._lines[row])
        gaps = int(self._gap_rows.searchsorted(row, side="right"))
        return 1 + row + (int(self._gap_blanks[gaps - 1]) if gaps else 0)

    def read(self, row: int, max_bytes: int) -> bytes | BadRow:
        """Bytes of a row without its newline; a row above ``max_bytes`` is not read."""
        # A row ends where the next begins, or where blank records between the two begin.
        start, stop = int(self._starts[row]), int(self._starts[row + 1])
        gap = int(self._gap_rows.searchsorted(row + 1)) if len(self._gap_rows) else 0
        if gap < len(self._gap_rows) and self._gap_rows[gap] == row + 1:
            stop = int(self._gap_starts[gap])
        if stop - start > max_bytes + 1:
            return too_long(stop - start - (self._reader.read(self.file, 1, stop - 1) == b"\n"))
        data = self._reader.read(self.file, stop - start, start).removesuffix(b"\n")
        return data if len(data) <= max_bytes else too_long(len(data))

    def _scan(
        self, quoted: bool
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]]:
        """Per block: offsets of the records that begin in it, their line numbers from 0, and which are blank."""
        size = self.file.size
        head = self._reader.read(self.file, min(3, size), 0)
        pending = 3 if head == BYTE_ORDER_MARK else 0  # a record that begins at the next byte to be read
        pending_line = lines = quotes = 0
        for base in range(0, size, _BLOCK_BYTES):
            count = min(_BLOCK_BYTES, size - base)
            block = np.frombuffer(self._reader.read(self.file, count, base), dtype=np.uint8)
            newlines = np.flatnonzero(block == _NEWLINE)
            numbers = np.arange(lines + 1, lines + 1 + len(newlines))
            lines += len(newlines)
            # A newline after an odd number of quotes is within a value. A doubled quote, which stands for one, changes
            # nothing: it counts twice.
            if quoted:
                marks = np.flatnonzero(block == _QUOTE)
                outside = (marks.searchsorted(newlines) + quotes) % 2 == 0
                newlines = newlines[outside]
                numbers = numbers[outside]
                quotes += len(marks)
            starts = newlines + (base + 1)
            if base <= pending < base + count:
                starts = np.concatenate([[pending], starts])
                numbers = np.concatenate([[pending_line], numbers])
            # What begins at the first byte of the next block, or at the end of the file, is left to that.
            if len(starts) and starts[-1] == base + count:
                pending = int(starts[-1])
                pending_line = int(numbers[-1])
                starts = starts[:-1]
                numbers = numbers[:-1]
            yield starts, numbers, self._blank(block, base, starts)

    def _blank(self, block: npt.NDArray[np.uint8], base: int, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of the records that begin in a block are blank."""
        first = block[starts - base]
        blank = first == _NEWLINE
        # Those that begin with white space are blank if nothing else comes before their newline.
        doubtful = np.flatnonzero((first == _RETURN) | (first == 32) | (first == 9))
        if len(doubtful):
            solid = np.flatnonzero((block != _RETURN) & (block != 32) & (block != 9))
            following = solid.searchsorted(starts[doubtful] - base)
            is_here = following < len(solid)
            blank[doubtful[is_here]] = block[solid[following[is_here]]] == _NEWLINE
            # The last one, whose line may end in the next block.
            for index in doubtful[~is_here]:
                blank[index] = self._is_blank(int(starts[index]))
        return blank

    def _is_blank(self, start: int) -> bool:
        size = 64
        while start < self.file.size:
            count = min(size, self.file.size - start)
            rest = self._reader.read(self.file, count, start).lstrip(BLANKS)
            if rest:
                return rest[0] == _NEWLINE
            start += count
            size = _BLOCK_BYTES
        return True


def too_long(num_bytes: int) -> BadRow:
    """Make the bad row that takes the place of one which is not read, to bound memory."""
    return BadRow("is longer than data.max_row_bytes", detail=f"{num_bytes} bytes")
