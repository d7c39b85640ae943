"""Decide if a failed run restarts: up to ``--max_restarts`` times, while it makes progress."""

from __future__ import annotations

from collections.abc import Callable

from shardtrain.launch.failure import GENERAL, Failure

RESTARTABLE = frozenset({1, 6, 8})
"""Exit codes of a program error, a lost rank, and a full disk.

Other failures, such as invalid input, would recur.
"""
CRASH_LOOP = 93
FRUITLESS = 3
"""Number of consecutive restarts without a newer checkpoint that count as a crash loop."""


class Restarts:
    """Counter of a run's restarts, and of consecutive restarts without a newer checkpoint."""

    def __init__(self, limit: int, newest_step: Callable[[], int]) -> None:
        self.limit = limit
        self.used = 0
        self._fruitless = 0
        self._newest_step = newest_step
        self._step = newest_step()
        self._cause = ""
        self.why = ""
        """Reason why the run is in a crash loop, for the message."""

    def after(self, code: int, first: Failure | None = None) -> int | None:
        """Return the exit status of the run after an attempt that ended with ``code``, or None to restart it.

        ``first`` is the first failure of that attempt. A program error that occurs twice in the same step
        would recur, because the same weights would process the same data.
        """
        if code not in RESTARTABLE or self.used == self.limit:
            return code
        step = self._newest_step()
        if step > self._step:
            self._step = step
            self._fruitless = 0
        cause = ""
        if first and first.place and code == GENERAL:
            cause = f"{first.kind} in {first.place}"
        if cause and cause == self._cause:
            self.why = f"two attempts in a row ended with {cause}"
            return CRASH_LOOP
        self._cause = cause
        if self._fruitless == FRUITLESS:
            self.why = f"{FRUITLESS} restarts in a row made no progress"
            return CRASH_LOOP
        self.used += 1
        self._fruitless += 1
        return None
