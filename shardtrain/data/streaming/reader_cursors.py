"""The cursors of a stream's virtual readers that one rank knows. Ranks merge them for checkpoints."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardtrain.data.feed import CursorUpdate
from shardtrain.data.streaming.stream import rows_of_reader


class ReaderCursors:
    """The cursors of one feed's readers, after the rows that this rank has read."""

    def __init__(self, num_readers: int) -> None:
        self._rows = np.zeros(num_readers, np.int64)
        self._cursors = np.zeros((num_readers, 3), np.int64)

    def begin(self, rows: int, cursors: npt.NDArray[np.int64] | None) -> None:
        """Start from known cursors, or from the beginning."""
        count = len(self._rows)
        if cursors is None:
            self._cursors = np.zeros((count, 3), np.int64)
            self._rows[:] = 0
        else:
            self._cursors = cursors.copy()
            self._rows[:] = _due(rows, count)
        self.mark()

    def mark(self) -> None:
        """Remember the cursors at the start of a step, because the step may be cancelled."""
        self._before = self._rows.copy(), self._cursors.copy()

    def move(self, move: CursorUpdate) -> None:
        """Store the cursor of a reader that has returned a row."""
        self._rows[move.reader] = move.rows
        self._cursors[move.reader] = move.cursor

    def at(self, rows: int) -> npt.NDArray[np.int64]:
        """Return the cursors after this many rows of the feed. -1 if this rank does not know a cursor."""
        due = _due(rows, len(self._rows))
        at = np.full_like(self._cursors, -1)
        # If this rank has already read the next step when it saves, use the cursors from before that step.
        # If another rank has read the last rows of a reader, both cursors on this rank are too old, and the
        # result stays -1. The maximum over all ranks is then the cursor that the other rank knows.
        for rows_of_readers, cursors in (self._before, (self._rows, self._cursors)):
            is_there = rows_of_readers == due
            at[is_there] = cursors[is_there]
        return at


def _due(rows: int, num_readers: int) -> npt.NDArray[np.int64]:
    """Return for each reader how many of the first ``rows`` rows belong to it."""
    counts = [rows_of_reader(rows, reader, num_readers) for reader in range(num_readers)]
    return np.array(counts, dtype=np.int64)
