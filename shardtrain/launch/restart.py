"""Whether a run that failed is started again: as often as ``--max_restarts`` says, while it gains anything."""

from __future__ import annotations

from collections.abc import Callable

from shardtrain.launch.failure import GENERAL, Failure

RESTARTABLE = frozenset({1, 6, 8})
"""An error of the program, a lost rank, a full disk. The other codes would come again: wrong input, bad numbers."""
CRASH_LOOP = 93
FRUITLESS = 3
"""Restarts in a row after which no checkpoint is newer: then it is a crash loop."""


class Restarts:
    """Counts the restarts of a run, and those in a row that saved nothing new."""

    def __init__(self, limit: int, newest_step: Callable[[], int]) -> None:
        self.limit = limit
        self.used = 0
        self._fruitless = 0
        self._newest_step = newest_step
        self._step = newest_step()
        self._cause = ""
        self.why = ""
        """Why a crash loop is one."""

    def after(self, code: int, first: Failure | None = None) -> int | None:
        """The exit status of the run after an attempt that ended with ``code``; None to start it again.

        ``first`` is the failure that came first in that attempt. An error of the program that comes twice in the same
        step will come again: the same weights met the same data.
        """
        if code not in RESTARTABLE or self.used == self.limit:
            return code
        step = self._newest_step()
        if step > self._step:
            self._step = step
            self._fruitless = 0
        cause = f"{first.kind} in {first.place}" if first and first.place and code == GENERAL else ""
        if cause and cause == self._cause:
            self.why = f"two attempts in a row ended with {cause}"
            return CRASH_LOOP
        self._cause = cause
        if self._fruitless == FRUITLESS:
            self.why = f"{FRUITLESS} restarts in a row gained nothing"
            return CRASH_LOOP
        self.used += 1
        self._fruitless += 1
        return None
