"""A feed is one dataset as an endless sequence of rows. Row k depends only on k and the seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardtrain.data import shared_opening
from shardtrain.data.digest import digest
from shardtrain.data.file_hashes import FileToHash
from shardtrain.data.order import sample_at
from shardtrain.data.packing.fitted import pack, table_of
from shardtrain.data.packing.packed_rows import PackedSequences, Packing
from shardtrain.data.packing.token_buffer import TokenBuffer
from shardtrain.data.prepared.shards import ShardTokenBuffer
from shardtrain.utils.errors import DataError, Problem

Cursor = tuple[int, int, int]
"""Cursor of a virtual reader, see ``stream``."""


@dataclass(frozen=True)
class CursorUpdate:
    """The position of a virtual reader after a row: it is at ``cursor`` after the feed's first ``rows`` rows.

    ``epoch`` is the epoch of the last of these rows, counted from 0.
    """

    reader: int
    rows: int
    cursor: Cursor
    epoch: int = 0


class Feed(Protocol):
    """Rows of one dataset in training order.

    Attributes:
        mean_targets: mean number of targets per row, learned or not.
        has_unknown_end: True if its end is unknown until it is read.
        num_readers: number of virtual readers, each of which has a cursor. 0 if k determines the position.
        fingerprint: SHA-256 in hex of everything that determines the rows and their order.
        files: maps each file to a fingerprint of its content. Used to name the file that has changed.
        passes: number of passes after which the data end. None if they are repeated forever.
    """

    mean_targets: float
    num_readers: int
    has_unknown_end: bool
    fingerprint: str
    files: Mapping[str, str]
    passes: int | None

    @property
    def num_documents(self) -> int | None:
        """Number of documents with a target. None if it is unknown until the data are read."""
        ...

    @property
    def num_rows(self) -> int | None:
        """Number of rows in one pass. None if it is unknown until the data are read."""
        ...

    def files_to_hash(self) -> list[FileToHash]:
        """Return the files to hash completely, because the fingerprint does not cover all of their bytes.

        See ``file_hashes.py``.
        """
        ...

    def write(self, k: int, out: PackedSequences, slot: int) -> tuple[int, CursorUpdate | None]:
        """Fill row ``slot`` of ``out`` with the k-th row of the order.

        If the feed has readers, k must increase from call to call.

        Returns:
            The row's sample id (-1 at the end of the data), and the new position of the reader.
        """
        ...

    def seek(self, rows: int, cursors: npt.NDArray[np.int64] | None) -> None:
        """Seek to the position at which all ranks together have consumed the first ``rows`` rows.

        ``cursors`` (num_readers, 3) are the readers' cursors at this position. None if they are unknown.
        """
        ...

    def epoch_after(self, rows: int) -> int:
        """Return the epoch (from 0) that the feed is in after ``rows`` rows."""
        ...


class FilesWatch:
    """Checks from time to time that no file of a feed has changed.

    All files are checked after every ``16 * num_files`` rows, but at least every 256 rows. With more than
    4,096 files, they are checked every ``num_files / 16`` rows.
    A row then costs at most 16 file checks on average.
    """

    def __init__(self, check: Callable[[], None], num_files: int) -> None:
        self._check = check
        self._interval = max(min(256, 16 * num_files), num_files // 16, 1)
        self._rows_left = self._interval

    def __call__(self) -> None:
        """Count a row. Raises ConfigError if a file was changed or removed."""
        self._rows_left -= 1
        if self._rows_left <= 0:
            self._check()
            self._rows_left = self._interval


class IndexedFeed:
    """A feed of tokens in memory or in prepared shards. Any row can be read directly.

    With a seed, each epoch is a permutation of the rows.
    """

    num_readers = 0
    has_unknown_end = False

    def __init__(
        self,
        tokens: TokenBuffer,
        packing: Packing,
        *,
        seed: int | None,
        passes: int | None,
        option: str,
        files: Mapping[str, str],
    ) -> None:
        # Prepared shards may have a fit table. They are files, so they may also change during the run.
        table = None
        folder = ""
        if isinstance(tokens, ShardTokenBuffer):
            table = table_of(tokens, packing, option)
            folder = str(tokens.folder)
        self._check_files = shared_opening.CheckAtSeek(tokens.check_unchanged, folder)
        self._watch = FilesWatch(tokens.check_unchanged, len(files))
        self._tokens = tokens
        self.rows = pack(tokens, packing, table)
        self._seed = seed
        self.passes = passes
        self.num_rows: int = self.rows.num_rows
        self.num_tokens = tokens.num_tokens
        self.num_documents = tokens.num_documents - self.rows.dropped - self.rows.single
        if self.num_rows < 1:
            rule = f"has no row with a target in the first {packing.seq_len + 1} tokens of its documents"
            fix = 'raise seq_len, use other data, or set data.long_documents="split"'
            raise DataError(str(Problem(option, None, rule, fix)))
        self.mean_targets = self.rows.num_targets / self.num_rows
        self.files = files
        # In earlier versions, documents without a target had rows. Change the fingerprint only for data
        # with such documents. Other runs of earlier versions can still resume.
        dropped = []
        if packing.long_documents == "cut" and self.rows.dropped:
            dropped.append(self.rows.dropped)
        self.fingerprint = digest(tokens.fingerprint, asdict(packing), seed, *dropped)

    def files_to_hash(self) -> list[FileToHash]:
        return self._tokens.files_to_hash() if isinstance(self._tokens, ShardTokenBuffer) else []

    def write(self, k: int, out: PackedSequences, slot: int) -> tuple[int, CursorUpdate | None]:
        """Write sample k of the order into a slot.

        Raises:
            ConfigError: a file was changed during the run.
        """
        self._watch()
        # After the end of the data, write nothing. The row then stays padding.
        if self.passes is not None and k >= self.passes * self.num_rows:
            return -1, None
        sample = k % self.num_rows
        if self._seed is not None:
            sample = int(sample_at(k, self.num_rows, self._seed))
        self.rows.write(sample, out, slot)
        return sample, None

    def seek(self, rows: int, cursors: npt.NDArray[np.int64] | None) -> None:
        """Check that the files are unchanged. There is no position to restore."""
        self._check_files()

    def epoch_after(self, rows: int) -> int:
        return max(0, rows - 1) // self.num_rows
