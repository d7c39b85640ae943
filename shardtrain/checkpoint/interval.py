"""When to save: every so many steps, by the clock, or as often as costs least for a stated rate of failures."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from shardtrain.config.schema import Checkpoint
from shardtrain.utils.log import logger

if TYPE_CHECKING:  # importing these imports torch, and `shardtrain checkpoint` needs this file without it
    from shardtrain.checkpoint.async_save import Saving
    from shardtrain.checkpoint.best import Best

SHORTEST_SECONDS = 10.0
LONGEST_SECONDS = 4 * 3600.0
LARGEST_SHARE = 0.1
"""An automatic interval never spends more of the time than this on waiting for saves."""
FIRST_SECONDS = 60.0
"""Until the first automatic save, from which the others are planned."""
SAID_CHANGE = 0.2


def best_seconds(stall_seconds: float, mttf_seconds: float) -> float:
    """The time between saves that loses least: Young (1974), Daly (2006), ``sqrt(2 * stall * mean time to failure)``.

    >>> round(best_seconds(1.0, 7.9 * 3600))
    238
    """
    return math.sqrt(2 * stall_seconds * mttf_seconds)


def useful_share(interval_seconds: float, stall_seconds: float, mttf_seconds: float, restart_seconds: float) -> float:
    """The expected share of the time that trains: a failure costs a restart and half an interval.

    >>> round(useful_share(238.5, 1.0, 7.9 * 3600, 240.0), 3)
    0.983
    """
    lost = (restart_seconds + interval_seconds / 2) / mttf_seconds
    return max(0.0, (1 - lost) / (1 + stall_seconds / interval_seconds))


class IsDue:
    """Whether to save after a step: by its number, by the first rank's clock, or as the best so far."""

    def __init__(self, options: Checkpoint, saving: Saving, best: Best) -> None:
        self._options = options
        self._saving = saving
        self._best = best

    def __call__(self, step: int, total_steps: int) -> bool:
        """Equal on all ranks: the clock is heard of in the sums that begin a step, and so is the best result."""
        options = self._options
        if not options.enable or options.load_only:
            return False
        first = options.enable_first_step_checkpoint and step == 1
        by_number = options.interval_type == "steps" and step % options.interval == 0
        by_number |= options.hf_interval > 0 and step % options.hf_interval == 0
        by_clock = self._saving.by_clock and self._saving.due
        is_best = bool(options.keep_best) and self._best.is_new(step)
        return first or step == total_steps or by_number or by_clock or is_best


class Interval:
    """The clock of one rank; ranks follow the first one's."""

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
        self._said = 0.0

    @property
    def seconds(self) -> float:
        """From one save to the next; without meaning where steps are counted."""
        return self._seconds

    def is_time(self) -> bool:
        """Whether a save is due by the clock."""
        return self._kind != "steps" and self._clock() - self._since >= self._seconds

    def restart(self) -> None:
        """A save was made or skipped: count from now."""
        self._since = self._clock()

    def note(self, stall_seconds: float) -> None:
        """A save kept the trainer waiting this long."""
        self._stalls.append(stall_seconds)
        self._plan()

    def note_write(self, seconds: float) -> None:
        """A save was on disk after this long."""
        self._writes.append(seconds)
        self._plan()

    def _plan(self) -> None:
        if self._kind != "automatic" or not self._stalls:
            return
        # A median, so that one slow save does not change the plan; and never so short that the next save finds the one
        # before it still on its way.
        stall = statistics.median(self._stalls)
        least = max(SHORTEST_SECONDS, stall / LARGEST_SHARE, 1.5 * max(self._writes, default=0.0))
        self._seconds = max(least, min(best_seconds(stall, self._mttf_seconds), LONGEST_SECONDS))
        if not self._said or abs(self._seconds - self._said) > SAID_CHANGE * self._said:
            self._said = self._seconds
            logger.info(
                f"saving every {self._seconds:.0f} s: a save keeps training waiting for {stall:.3g} s, and "
                f"checkpoint.mean_time_to_failure_hours={self._mttf_seconds / 3600:g}"
            )
