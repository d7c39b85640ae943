"""Read a plain or compressed file in blocks from its beginning. All data before a damaged part are returned."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import math
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from shardtrain.data import sandbox
from shardtrain.data.sources._data_files import File
from shardtrain.utils import libraries
from shardtrain.utils.units import format_bytes

BLOCK_BYTES = 256 * 1024
"""Block size of readers. Hundreds of files may be open at a time."""

# a block of 128 KiB may be compressed to 4 bytes, so this limits the output of one step
_ZSTD_BYTES_AT_ONCE = 1024
# the window of "zstd --long=31", the largest one
_ZSTD_WINDOW = 2**31
_TOO_LARGE = ("too much memory", "Memory usage limit")
"""Phrases in errors of zstandard and lzma about a window that is larger than their limit."""


class Damaged(Exception):
    """Compressed data cannot be read further. The message is the reason. Earlier reads have returned all valid data."""


class Stream(Protocol):
    """Interface of an open file.

    Attributes:
        is_compressed: True if reading decompresses the file.
        most_bytes: Limit of the decompressed size of one record. The reader of the records sets it.
    """

    is_compressed: bool
    most_bytes: float

    def read(self, size: int) -> bytes:
        """Return at most about ``size`` bytes. Return no bytes at the end.

        Raises:
            Damaged: the data cannot be read further, or exceeds ``most_bytes`` without a record.
            DataError: decompression took too long without a record.
        """
        ...

    def gave(self) -> None:
        """Report that a record was read. This restarts the limits of time and size.

        A compressed file may take ``data.artefact_seconds`` for each record.
        """
        ...


@contextmanager
def open_stream(file: File) -> Iterator[Stream]:
    """Open a file for sequential reading. The suffix of its name selects the compression.

    Raises:
        ConfigError: the file has changed since it was listed, or zstandard is not installed.
        DataError: the file cannot be read.
    """
    # Limit the time only for compressed files. A plain file cannot return more than its size.
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
            return _Consecutive(file, raw, bz2.BZ2Decompressor)
        case ".xz":
            window_bytes = _window_bytes()
            return _Consecutive(file, raw, lambda: lzma.LZMADecompressor(memlimit=window_bytes))
        case ".zst":
            return _Zstd(file, raw)
    raise AssertionError(file.compression)


def _window_bytes() -> int:
    """Return the limit for the window of one file, whose data stay in memory."""
    return min(sandbox.limits().memory_bytes // 2, _ZSTD_WINDOW)


def _check_window(file: File, error: Exception) -> None:
    """Raise DataError if a library failed because the window exceeds the limit."""
    if not any(words in str(error) for words in _TOO_LARGE):
        return
    limit = sandbox.limits().memory_bytes
    raise file.unusable(
        f"needs more than half of data.artefact_memory_bytes={limit} for its window of compression",
        "raise it, or compress the file again with a smaller window (xz -6, zstd --long=27)",
    ) from error


class _Clock:
    """Limits the CPU time that a compressed file takes until it returns a record.

    One kilobyte may contain a million empty lines, which are no records.
    """

    def __init__(self, file: File) -> None:
        self._file = file
        self._seconds = sandbox.limits().seconds
        self._gave = True
        self._since = 0.0

    def gave(self) -> None:
        """Restart the clock at the next check. The reader's work on a record then does not count."""
        self._gave = True

    def check(self) -> None:
        """Raise DataError if the file has taken too long."""
        if self._gave:
            self._gave = False
            self._since = time.thread_time()
        elif time.thread_time() - self._since > self._seconds:
            rule = f"takes more than data.artefact_seconds={self._seconds} of decompression without a row"
            raise self._file.unusable(
                rule, "raise it, get the file from its source again, or remove it"
            )


class _Timed(io.RawIOBase):
    """A file that checks the clock at each read. Data that decompress to nothing take time too."""

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
    """Converts the errors of the compression libraries to errors of this package.

    Each read calls the library once. An error then cannot lose data that were read before it.
    """

    def __init__(self, file: File, inner: Any, clock: _Clock | None = None) -> None:
        self._file = file
        self._clock = clock
        self.is_compressed = file.compression is not None
        self.most_bytes = math.inf
        self._bytes = 0
        self._read = inner.read1 if file.compression == ".gz" else inner.read

    def gave(self) -> None:
        self._bytes = 0
        if self._clock is not None:
            self._clock.gave()

    def read(self, size: int) -> bytes:
        if self._clock is not None:
            self._clock.check()
        if self._bytes > self.most_bytes:
            raise Damaged(
                f"contains more than {format_bytes(self.most_bytes)} without the end of a row"
            )
        try:
            block = self._read(size)
            self._bytes += len(block)
            return block
        except EOFError as error:
            raise Damaged("the file ends in the middle of its compressed data") from error
        except (zlib.error, lzma.LZMAError) as error:
            raise Damaged("the compressed data is damaged") from error
        except OSError as error:
            # If gzip or bz2 find an error in the data, their OSError has no errno.
            if error.errno is None:
                raise Damaged("the compressed data is damaged") from error
            raise self._file.unreadable(error) from error


class _Consecutive:
    """Consecutive streams of bzip2 or xz.

    The libraries' own readers have no limit for the dictionary of xz, and ignore damaged data after a
    stream.
    """

    def __init__(
        self,
        file: File,
        raw: io.RawIOBase,
        new_decoder: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor],
    ) -> None:
        self._file = file
        self._new_decoder = new_decoder
        self._buffer = io.BufferedReader(raw, BLOCK_BYTES)
        self._compressed = b""
        self._decoder: bz2.BZ2Decompressor | lzma.LZMADecompressor | None = None

    def read(self, size: int) -> bytes:
        while True:
            if not self._compressed and (self._decoder is None or self._decoder.needs_input):
                # Read small pieces, because a decoder copies the bytes that follow its stream.
                self._compressed = self._buffer.read(io.DEFAULT_BUFFER_SIZE)
                if not self._compressed:
                    if self._decoder is not None:
                        raise EOFError
                    return b""
            if self._decoder is None:
                # Zeros after a stream are padding. Skip them before the next stream.
                self._compressed = self._compressed.lstrip(b"\0")
                if not self._compressed:
                    continue
                self._decoder = self._new_decoder()
            try:
                piece = self._decoder.decompress(self._compressed, size)
            except lzma.LZMAError as error:
                _check_window(self._file, error)
                raise
            self._compressed = b""
            if self._decoder.eof:
                self._compressed = self._decoder.unused_data
                self._decoder = None
            if piece:
                return piece


class _Zstd:
    """Consecutive zstandard frames. The library's own reader does not detect a truncated file."""

    def __init__(self, file: File, raw: io.RawIOBase) -> None:
        self._library = libraries.load("zstandard", file.option, file.path)
        self._decompressor = self._library.ZstdDecompressor(max_window_size=_window_bytes())
        self._file = file
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
            # At the end of a truncated file, return the decompressed data first, and report the error at
            # the next read.
            if not self._compressed:
                if self._frame is not None and not total:
                    raise EOFError
                break
            try:
                if self._frame is None:
                    self._frame = self._decompressor.decompressobj()
                given = self._compressed[:_ZSTD_BYTES_AT_ONCE]
                piece = self._frame.decompress(given)
                unused = len(self._frame.unused_data) if self._frame.eof else 0
                self._compressed = self._compressed[len(given) - unused :]
                if self._frame.eof:
                    self._frame = None
            except self._library.ZstdError as error:
                _check_window(self._file, error)
                self._failed = zlib.error(str(error))
                break
            # a file may consist of empty frames
            if piece:
                pieces.append(piece)
                total += len(piece)
        if self._failed is not None and not total:
            raise self._failed
        return b"".join(pieces)
