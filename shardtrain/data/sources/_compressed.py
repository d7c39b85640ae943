"""Reading a file from its beginning in blocks, compressed or not, so that what comes before damage is had."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import math
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from shardtrain.data import sandbox
from shardtrain.data.sources._data_files import File
from shardtrain.utils import libraries
from shardtrain.utils.units import format_bytes

BLOCK_BYTES = 256 * 1024
"""Bytes that readers ask for at once; hundreds of files may be open at a time."""

_ZSTD_BYTES_AT_ONCE = 1024  # as a block of 128 KiB may be written in 4 bytes, this bounds what one step gives
_ZSTD_WINDOW = 2**31  # what "zstd --long=31" writes


class Damaged(Exception):
    """Compressed data cannot be read further. The message has the reason. All data before it was returned."""


class Stream(Protocol):
    """Interface of an open file for its readers.

    Attributes:
        most_bytes: Maximum of decompressed bytes without a complete record. A reader of records sets it.
    """

    most_bytes: float

    def read(self, size: int) -> bytes:
        """Return at most about ``size`` bytes; none at the end.

        Raises:
            Damaged: the data cannot be read further, or exceeds ``most_bytes`` without a record.
            DataError: decompression took too long without a record.
        """
        ...

    def gave(self) -> None:
        """Report that a record was read.

        A compressed file may take ``data.artefact_seconds`` for each record.
        """
        ...


@contextmanager
def open_stream(file: File) -> Iterator[Stream]:
    """Open a file for reading in sequence, by its name's ending.

    Raises:
        ConfigError: when the file changed since it was listed, or zstandard is not installed.
        DataError: when it cannot be read.
    """
    # Only compressed files are under the clock: a plain one gives no more than its size.
    raw = os.fdopen(file.open(), "rb", buffering=0)
    with raw:
        if file.compression is None:
            yield _Stream(file, raw)
            return
        clock = _Clock(file)
        yield _Stream(file, _decompressed(file, _Timed(raw, clock)), clock)


def _decompressed(file: File, raw: io.RawIOBase) -> Any:
    match file.compression:
        case ".gz":
            return gzip.GzipFile(fileobj=io.BufferedReader(raw, BLOCK_BYTES), mode="rb")
        case ".bz2":
            return bz2.BZ2File(io.BufferedReader(raw, BLOCK_BYTES))
        case ".xz":
            return lzma.LZMAFile(io.BufferedReader(raw, BLOCK_BYTES))
        case ".zst":
            return _Zstd(file, raw)
    raise AssertionError(file.compression)


class _Clock:
    """The CPU time since a compressed file last gave something: a kilobyte of it may be a million empty
    lines."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._seconds = sandbox.limits().seconds
        self._gave = True
        self._since = 0.0

    def gave(self) -> None:
        """Start from here: what the reader of the file does with a record is its own affair."""
        self._gave = True

    def check(self) -> None:
        """Raise DataError where the file has taken too long."""
        if self._gave:
            self._gave = False
            self._since = time.thread_time()
        elif time.thread_time() - self._since > self._seconds:
            rule = f"takes more than data.artefact_seconds={self._seconds} of decompression without a row"
            raise self._file.unusable(rule, "raise it, get the file from its source again, or leave it out")


class _Timed(io.RawIOBase):
    """A file of which each read is under the clock: also what decompresses to nothing takes its time."""

    def __init__(self, raw: io.RawIOBase, clock: _Clock) -> None:
        self._raw = raw
        self._clock = clock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        self._clock.check()
        count: int | None = self._raw.readinto(buffer)  # type: ignore[attr-defined]
        return count


class _Stream:
    """Turns each library's errors into ours.

    One read of the library at a time, so that no data is lost with them.
    """

    def __init__(self, file: File, inner: Any, clock: _Clock | None = None) -> None:
        self._file = file
        self._clock = clock
        self.most_bytes = math.inf
        self._bytes = 0
        self._read = inner.read1 if file.compression and file.compression != ".zst" else inner.read

    def gave(self) -> None:
        self._bytes = 0
        if self._clock is not None:
            self._clock.gave()

    def read(self, size: int) -> bytes:
        if self._clock is not None:
            self._clock.check()
            if self._bytes > self.most_bytes:
                raise Damaged(f"holds more than {format_bytes(self.most_bytes)} without the end of a row")
        try:
            block = self._read(size)
            self._bytes += len(block)
            return block
        except EOFError as error:
            raise Damaged("the file ends in the middle of its compressed data") from error
        except (zlib.error, lzma.LZMAError) as error:
            raise Damaged("the compressed data is damaged") from error
        except OSError as error:
            if error.errno is None:  # gzip and bz2 say so what is wrong in the data
                raise Damaged("the compressed data is damaged") from error
            raise self._file.unreadable(error) from error


class _Zstd:
    """Frames of zstandard, one after the other. The library's own reader takes a cut file for a whole one."""

    def __init__(self, file: File, raw: io.RawIOBase) -> None:
        self._library = libraries.load("zstandard", file.option, file.path)
        self._raw = raw
        self._compressed = memoryview(b"")
        self._frame: Any = None
        self._failed: zlib.error | None = None

    def read(self, size: int) -> bytes:
        pieces: list[bytes] = []
        total = 0
        while total < size and self._failed is None:
            if not self._compressed:
                self._compressed = memoryview(self._raw.read(BLOCK_BYTES) or b"")
            # The end of the file: within a frame it was cut, which is said once what came before has been
            # given.
            if not self._compressed:
                if self._frame is not None and not total:
                    raise EOFError
                break
            try:
                if self._frame is None:
                    self._frame = self._library.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()
                given = self._compressed[:_ZSTD_BYTES_AT_ONCE]
                piece = self._frame.decompress(given)
                unused = len(self._frame.unused_data) if self._frame.eof else 0
                self._compressed = self._compressed[len(given) - unused :]
                if self._frame.eof:
                    self._frame = None
            except self._library.ZstdError as error:
                self._failed = zlib.error(str(error))
                break
            pieces.append(piece)
            total += len(piece)
        if self._failed is not None and not total:
            raise self._failed
        return b"".join(pieces)
