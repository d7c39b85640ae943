"""The time between saves: as configured, or the time that costs least for a stated rate of failures."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable

from shardtrain.config.schema import Checkpoint
from shardtrain.utils.log import logger

SHORTEST_SECONDS = 10.0
LONGEST_SECONDS = 4 * 3600.0
LARGEST_SHARE = 0.1
"""Largest fraction of the time that an automatic interval spends waiting for saves."""
FIRST_SECONDS = 60.0
"""Time until the first automatic save. Later saves are planned from its duration."""
LOGGED_CHANGE = 0.2
"""Relative change of an automatic interval from which it is logged again."""


def best_seconds(stall_seconds: float, mttf_seconds: float) -> float:
    """Return the interval that loses the least time: ``sqrt(2 * stall * mean time to failure)``.

    Source: Young (1974), Daly (2006).

    >>> round(best_seconds(1.0, 7.9 * 3600))
    238
    """
    return math.sqrt(2 * stall_seconds * mttf_seconds)


def useful_share(
    interval_seconds: float,
    stall_seconds: float,
    mttf_seconds: float,
    restart_seconds: float,
) -> float:
    """Return the expected fraction of the time spent on training. A failure costs a restart and
    half an interval.

    >>> round(useful_share(238.5, 1.0, 7.9 * 3600, 240.0), 3)
    0.983
    """
    lost_share = (restart_seconds + interval_seconds / 2) / mttf_seconds
    stall_share = stall_seconds / interval_seconds
    return max(0.0, (1 - lost_share) / (1 + stall_share))


class Interval:
    """Clock for saves. Only rank 0's is used."""

    def __init__(self, options: Checkpoint, clock: Callable[[], float] = time.monotonic) -> None:
        self._kind = options.interval_type
        self._seconds = float(options.interval)
        self._mttf_seconds = options.mean_time_to_failure_hours * 3600
        self._clock = clock
        self._since = clock()
        self._stalls: deque[float] = deque(maxlen=9)
        self._writes: deque[float] = deque(maxlen=9)
        if self._kind == "automatic":
            self._seconds = FIRST_SECONDS
        self._logged_seconds = 0.0

    @property
    def seconds(self) -> float:
        """Time from one save to the next. Unused if the interval is in steps."""
        return self._seconds

    def is_time(self) -> bool:
        """True if a save is due by the clock."""
        return self._kind != "steps" and self._clock() - self._since >= self._seconds

    def restart(self) -> None:
        """Count from now, after a save was made or skipped."""
        self._since = self._clock()

    def note(self, stall_seconds: float) -> None:
        """Record how long the trainer waited for a save."""
        self._stalls.append(stall_seconds)
        self._plan()

    def note_write(self, seconds: float) -> None:
        """Record how long a save took until it was on disk."""
        self._writes.append(seconds)
        self._plan()

    def _plan(self) -> None:
        if self._kind != "automatic" or not self._stalls:
            return
        # Use the median, so one slow save does not change the plan. The interval must be long
        # enough for a save to be complete before the next one.
        stall = statistics.median(self._stalls)
        slowest_write = max(self._writes, default=0.0)
        least = max(SHORTEST_SECONDS, stall / LARGEST_SHARE, 1.5 * slowest_write)
        best = min(best_seconds(stall, self._mttf_seconds), LONGEST_SECONDS)
        self._seconds = max(least, best)
        change = abs(self._seconds - self._logged_seconds)
        if not self._logged_seconds or change > LOGGED_CHANGE * self._logged_seconds:
            self._logged_seconds = self._seconds
            logger.info(
                f"saving every {self._seconds:.0f} s: training waits {stall:.3g} s for a save, and "
                f"checkpoint.mean_time_to_failure_hours={self._mttf_seconds / 3600:g}"
            )
