"""What is read whole at start is bounded: files of a few bytes can hold gigabytes of rows, and hours of work.

A dataset of unknown origin is read whole because its files are small (``data.mode="auto"``). Compressed text and
Parquet may be a thousand times larger once they are read. What is bounded is the memory of what is kept, and the CPU
time of data that have grown more than ``MAX_GROWTH`` times; data that grow as text does may take as long as they need.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from shardtrain.data import sandbox
from shardtrain.data.documents.read_documents import text_size
from shardtrain.utils.errors import DataError

MAX_GROWTH = 50
"""Text in gzip, bzip2, xz or zstandard grows 3 to 15 times."""
FREE_BYTES = 64 * 2**20
"""Data that are no larger than this when read have grown as far as they like."""
ROW_BYTES = 128
"""What a row takes beside its text: an object, its place in lists."""
PROCESS_BYTES = 2**28
"""What the process itself, and rows on their way, take of the limit of memory."""

_LOOK_EVERY = 64

T = TypeVar("T")


class Growth:
    """Counts what reading a dataset gives. ``bytes_on_disk`` None is not known, and nothing is bounded by it."""

    def __init__(self, dataset: str, bytes_on_disk: int | None, way_out: str = "") -> None:
        self._dataset = dataset
        self._disk = bytes_on_disk
        self._way_out = way_out
        self._seconds = sandbox.limits().seconds
        self._bytes = sandbox.limits().memory_bytes
        self._most_bytes = max(self._bytes - PROCESS_BYTES, self._bytes // 2)
        self._start = time.process_time() - sandbox.spent_seconds()
        self._grown = self._kept = 0

    def rows(self, keyed: Iterable[tuple[Any, T]]) -> Iterator[tuple[Any, T]]:
        """The same rows; raises DataError at one with which data that have grown too often go beyond the limits."""
        for number, (key, row) in enumerate(keyed):
            self._grown += ROW_BYTES + text_size(row)
            if number % _LOOK_EVERY == 0 or self._grown > FREE_BYTES:
                self._check_rows()
            yield key, row

    def keep(self, num_bytes: int) -> None:
        """Count what stays in memory; raises DataError where it is too much."""
        self._kept += num_bytes
        if self._kept > self._most_bytes:
            raise self._beyond(f"memory_bytes={self._bytes} of memory when it is read whole")

    def _check_rows(self) -> None:
        if self._disk is None or self._grown <= max(FREE_BYTES, MAX_GROWTH * self._disk):
            return
        grown = f"has grown from {self._disk} bytes to {self._grown} so far"
        if self._grown > self._most_bytes:
            raise self._beyond(f"memory_bytes={self._bytes} of memory: it {grown}")
        if time.process_time() - self._start > self._seconds:
            raise self._beyond(f"seconds={self._seconds} to read: it {grown}")

    def _beyond(self, limit: str) -> DataError:
        return DataError(f"dataset {self._dataset} takes more than data.artefact_{limit}; raise it{self._way_out}")
