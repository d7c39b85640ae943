"""Whether a run that failed is started again: as often as ``--max_restarts`` says, while it gains anything."""

from __future__ import annotations

from collections.abc import Callable

RESTARTABLE = frozenset({1, 6, 8})
"""An error of the program, a lost rank, a full disk. The other codes would come again: wrong input, bad numbers."""
CRASH_LOOP = 93
FRUITLESS = 3
"""Restarts in a row after which no checkpoint is newer: then it is a crash loop."""


class Restarts:
    """Counts the restarts of a run, and those in a row that saved nothing new."""

    def __init__(self, limit: int, newest_step: Callable[[], int]) -> None:
        self.limit, self.used, self._fruitless = limit, 0, 0
        self._newest_step, self._step = newest_step, newest_step()

    def after(self, code: int) -> int | None:
        """The exit status of the run after an attempt that ended with ``code``; None to start it again."""
        if code not in RESTARTABLE or self.used == self.limit:
            return code
        step = self._newest_step()
        if step > self._step:
            self._step, self._fruitless = step, 0
        if self._fruitless == FRUITLESS:
            return CRASH_LOOP
        self.used, self._fruitless = self.used + 1, self._fruitless + 1
        return None
