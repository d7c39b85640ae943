"""Where each record of a plain text file begins: one scan in bounded memory, then any record at once."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtrain.data.sources import BadRow
from shardtrain.data.sources._files import File

_BLOCK_BYTES = 16 * 2**20
_NEWLINE, _QUOTE, _RETURN = 10, 34, 13
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BLANKS = b" \t\r"
"""What a blank line may have; such a line is not a row."""


class Reader:
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


class Index:
    """Records of a file, and their lines; 8 bytes a record.

    A record is a line, or with ``quoted`` the lines up to the next newline outside double quotes, as in CSV. Blank
    records are not rows. A byte order mark at the head is left out; a last line needs no newline.
    """

    def __init__(
        self, file: File, reader: Reader, arrays: Mapping[str, Any] | None = None, *, quoted: bool = False
    ) -> None:
        """``arrays`` is what ``arrays`` gave on another rank, and spares the scan."""
        self.file, self._reader = file, reader
        found = self._found(quoted) if arrays is None else arrays
        self._starts, self._rows_before_blank = found["starts"], found["rows_before_blank"]
        self._lines = found.get("lines")
        self.num_rows = len(self._starts) - 1 - len(self._rows_before_blank)

    def arrays(self) -> dict[str, npt.NDArray[np.int64]]:
        """What the scan found."""
        found = {"starts": self._starts, "rows_before_blank": self._rows_before_blank}
        return found if self._lines is None else {**found, "lines": self._lines}

    def _found(self, quoted: bool) -> dict[str, npt.NDArray[np.int64]]:
        starts, lines, blanks = [], [], []
        records = 0
        for block_starts, block_lines, block_blanks in self._scan(quoted):
            starts.append(block_starts)
            lines.append(block_lines)
            blanks.append(np.flatnonzero(block_blanks) + records)
            records += len(block_starts)
        blank_records = np.concatenate([*blanks, np.array([], np.int64)])
        found = {
            "starts": np.concatenate([*starts, np.array([self.file.size])]),
            "rows_before_blank": blank_records - np.arange(len(blank_records)),
        }
        # without quotes, records are lines
        return {**found, "lines": np.concatenate([*lines, np.array([], np.int64)])} if quoted else found

    def line(self, row: int) -> int:
        """Line at which a row begins, from 1."""
        record = self._record(row)
        return 1 + (record if self._lines is None else int(self._lines[record]))

    def read(self, row: int, max_bytes: int) -> bytes | BadRow:
        """Bytes of a row without its newline; a row above ``max_bytes`` is not read."""
        record = self._record(row)
        start, stop = int(self._starts[record]), int(self._starts[record + 1])
        if stop - start > max_bytes + 1:
            return too_long(stop - start - (self._reader.read(self.file, 1, stop - 1) == b"\n"))
        data = self._reader.read(self.file, stop - start, start).removesuffix(b"\n")
        return data if len(data) <= max_bytes else too_long(len(data))

    def _record(self, row: int) -> int:
        if not len(self._rows_before_blank):
            return row
        return row + int(self._rows_before_blank.searchsorted(row, side="right"))

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
            if quoted:
                marks = np.flatnonzero(block == _QUOTE)
                outside = (marks.searchsorted(newlines) + quotes) % 2 == 0
                newlines, numbers = newlines[outside], numbers[outside]
                quotes += len(marks)
            starts = newlines + (base + 1)
            if base <= pending < base + count:
                starts = np.concatenate([[pending], starts])
                numbers = np.concatenate([[pending_line], numbers])
            if len(starts) and starts[-1] == base + count:
                pending, pending_line = int(starts[-1]), int(numbers[-1])
                starts, numbers = starts[:-1], numbers[:-1]
            yield starts, numbers, self._blank(block, base, starts)

    def _blank(self, block: npt.NDArray[np.uint8], base: int, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        first = block[starts - base]
        blank = first == _NEWLINE
        for index in np.flatnonzero((first == _RETURN) | (first == 32) | (first == 9)):  # rare: looked at one by one
            blank[index] = self._is_blank(int(starts[index]))
        return blank

    def _is_blank(self, start: int) -> bool:
        size = 64
        while start < self.file.size:
            count = min(size, self.file.size - start)
            rest = self._reader.read(self.file, count, start).lstrip(BLANKS)
            if rest:
                return rest[0] == _NEWLINE
            start, size = start + count, _BLOCK_BYTES
        return True


def too_long(num_bytes: int) -> BadRow:
    """Make the bad row that takes the place of one which is not read, to bound memory."""
    return BadRow("is longer than data.max_row_bytes", detail=f"{num_bytes} bytes")
