"""Read the records of a text sequentially in bounded memory, for files without a ``RecordIndex``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardtrain.data.sources import BadRow
from shardtrain.data.sources._compressed import BLOCK_BYTES, Damaged, Stream
from shardtrain.data.sources._index import BLANKS, BYTE_ORDER_MARK, longest_skipped, too_long

SKIPPED_BYTES = 64 * 2**20
"""Reading of a compressed file ends at a record that is longer than this and than twice the maximum row size."""


@dataclass(frozen=True)
class _Long:
    """A line that was skipped because of its length."""

    num_bytes: int
    num_quotes: int
    blank: bool = False


@dataclass(frozen=True)
class _Blank:
    """Consecutive blank lines. ``text`` ends with the newline of the last line."""

    text: bytes

    @property
    def num_lines(self) -> int:
        return self.text.count(b"\n")


def records(
    stream: Stream, max_bytes: int, *, quoted: bool = False
) -> Iterator[tuple[int, bytes | BadRow]]:
    """Yield the line number (from 1) and the bytes of each record that is not blank, see ``RecordIndex``.

    A record longer than ``max_bytes`` becomes a BadRow. If the compressed data are damaged, the last record
    is a BadRow, and the truncated record is not returned. Reading of a compressed file also ends at a
    record longer than ``SKIPPED_BYTES``, because skipping a record that decompresses from a few MB could
    take an hour. A plain file has the limit of ``RecordIndex``.
    """
    number = 1
    if stream.is_compressed:
        stream.most_bytes = max(SKIPPED_BYTES, 2 * max_bytes)
    else:
        stream.most_bytes = longest_skipped(max_bytes)
    try:
        lines = _lines(stream, max_bytes)
        counted_lines = _joined(lines, max_bytes) if quoted else ((line, 1) for line in lines)
        for record, num_lines in counted_lines:
            start = number
            number += num_lines
            if isinstance(record, _Blank):
                number = start + record.num_lines
            elif isinstance(record, _Long):
                # A long run of spaces is not a record.
                if not record.blank:
                    stream.gave()
                    yield start, too_long(record.num_bytes)
            elif record.strip(BLANKS):
                stream.gave()
                if len(record) > max_bytes:
                    yield start, too_long(len(record))
                else:
                    yield start, record
    except Damaged as error:
        yield number, BadRow(str(error))


def _blocks(stream: Stream) -> Iterator[bytes]:
    """Yield the blocks of a stream, without a byte order mark."""
    head = b""
    while len(head) < len(BYTE_ORDER_MARK) and (block := stream.read(BLOCK_BYTES)):
        head += block
    yield head.removeprefix(BYTE_ORDER_MARK)
    while block := stream.read(BLOCK_BYTES):
        yield block


def _lines(stream: Stream, max_bytes: int) -> Iterator[bytes | _Long | _Blank]:
    """Yield lines without newlines.

    For a line longer than a block and ``max_bytes``, yield only its length.
    """
    # The current line: its bytes so far, or only its length if it is long.
    begun = bytearray()
    long = None
    for block in _blocks(stream):
        # Yield consecutive blank lines together, because a compressed file may contain billions of them.
        if not begun and long is None and block[:64].isspace() and not block.strip(BLANKS + b"\n"):
            cut = block.rfind(b"\n") + 1
            if cut:
                yield _Blank(block[:cut])
            begun += block[cut:]
            continue

        # The block begins with the rest of the current line. If the line is long, keep only its length.
        first, *others = block.split(b"\n")
        begun += first
        if long or len(begun) > max_bytes:
            long = _longer(long, begun)
            begun.clear()

        # The line ends in this block, and is followed by complete lines and the start of the next line.
        if not others:
            continue
        yield long or bytes(begun)
        yield from others[:-1]
        begun = bytearray(others[-1])
        long = None
    if long or begun:
        yield long or bytes(begun)


def _longer(line: _Long | None, more: bytearray) -> _Long:
    """Add more bytes to a long line."""
    line = line or _Long(0, 0, blank=True)
    blank = line.blank and not more.strip(BLANKS)
    return _Long(line.num_bytes + len(more), line.num_quotes + more.count(b'"'), blank)


def _joined(
    lines: Iterator[bytes | _Long | _Blank], max_bytes: int
) -> Iterator[tuple[bytes | _Long | _Blank, int]]:
    """Join lines until all quotes are closed. Yield each record with its number of lines."""
    pieces: list[bytes] = []
    num_lines = num_bytes = num_quotes = 0
    long = False
    for line in lines:
        if isinstance(line, _Blank):
            if not num_lines:
                yield line, 0
                continue
            # Inside quotes, blank lines belong to the record.
            # The last one is counted below like any other line.
            more = line.num_lines - 1
            num_lines += more
            num_bytes -= more
            line = line.text[:-1]
        num_lines += 1
        if isinstance(line, _Long):
            num_bytes += line.num_bytes
            num_quotes += line.num_quotes
            long = True
        else:
            num_bytes += len(line)
            num_quotes += line.count(b'"')
            pieces.append(line)
            long = long or num_bytes + num_lines - 1 > max_bytes
        # Do not keep a record that is too long. Only count its bytes.
        if long:
            pieces.clear()
        # If all quotes are closed, the record ends with this line.
        if num_quotes % 2 == 0:
            if long:
                is_blank = isinstance(line, _Long) and line.blank and num_lines == 1
                yield _Long(num_bytes + num_lines - 1, 0, is_blank), num_lines
            else:
                yield b"\n".join(pieces), num_lines
            pieces = []
            num_lines = 0
            num_bytes = 0
            num_quotes = 0
            long = False
    if not num_lines:
        return
    # The file ends inside quotes.
    if long:
        yield _Long(num_bytes + num_lines - 1, 0), num_lines
    else:
        yield b"\n".join(pieces), num_lines
