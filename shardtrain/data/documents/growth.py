"""Limit the memory and the time for reading a dataset when a run starts.

A small compressed file can expand to gigabytes. ``data.mode="auto"`` reads a dataset completely if its
files are small, even if their origin is unknown. Compressed text and Parquet may become a thousand times
larger by decompression. The memory of the data is always limited. CPU time is limited only for data that
expand more than ``MAX_GROWTH`` times.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from shardtrain.data import sandbox
from shardtrain.data.documents.read_documents import text_size
from shardtrain.utils.errors import DataError

MAX_GROWTH = 50
"""Factor by which data may expand before time is limited. (Text expands 3 to 15 times.)"""
FREE_BYTES = 64 * 2**20
"""Data may expand by any factor up to this size."""
ROW_BYTES = 128
"""Memory of a row in addition to its text: an object, and references to it in lists."""
PROCESS_BYTES = 2**28
"""Part of the memory limit that is reserved for the process itself and for rows that it is processing."""

_CHECK_INTERVAL = 64

T = TypeVar("T")


class Growth:
    """Counts the bytes of a dataset while it is read.

    If ``bytes_on_disk`` is None, expansion is not limited.
    """

    def __init__(self, dataset: str, bytes_on_disk: int | None, way_out: str = "") -> None:
        self._dataset = dataset
        self._disk = bytes_on_disk
        self._way_out = way_out
        self._seconds = sandbox.limits().seconds
        self._bytes = sandbox.limits().memory_bytes
        self._max_bytes = max(self._bytes - PROCESS_BYTES, self._bytes // 2)
        self._start = time.process_time() - sandbox.spent_seconds()
        self._grown = self._kept = 0

    def rows(self, keyed: Iterable[tuple[Any, T]]) -> Iterator[tuple[Any, T]]:
        """Yield the rows unchanged.

        Raises:
            DataError: the rows expand by a large factor, and exceed the limit of memory or CPU time.
        """
        for number, (key, row) in enumerate(keyed):
            self._grown += ROW_BYTES + text_size(row)
            if number % _CHECK_INTERVAL == 0 or self._grown > FREE_BYTES:
                self._check_rows()
            yield key, row

    def keep(self, num_bytes: int) -> None:
        """Count bytes that stay in memory. Raises DataError above the limit."""
        self._kept += num_bytes
        if self._kept > self._max_bytes:
            raise self._beyond(f"memory_bytes={self._bytes} of memory when it is read completely")

    def _check_rows(self) -> None:
        # Text that expands by a normal factor is not suspicious, so do not limit it.
        if self._disk is None or self._grown <= max(FREE_BYTES, MAX_GROWTH * self._disk):
            return
        grown = f"expanded from {self._disk} bytes to {self._grown} so far"
        if self._grown > self._max_bytes:
            raise self._beyond(f"memory_bytes={self._bytes} of memory: it {grown}")
        if time.process_time() - self._start > self._seconds:
            raise self._beyond(f"seconds={self._seconds} to read: it {grown}")

    def _beyond(self, limit: str) -> DataError:
        return DataError(
            f"dataset {self._dataset} takes more than data.artefact_{limit}; raise it{self._way_out}"
        )
