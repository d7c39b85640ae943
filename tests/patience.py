"""Timeouts of tests: written for an idle machine, and extended by the speed and load of this one.

No test is about speed. A timeout only ends a hang, so a timeout that is too long costs nothing except on failure.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable

REFERENCE_SECONDS = 0.015
"""CPU time of ``_work`` on the reference machine, a server core of 2023."""


def _work() -> int:
    return sum(number * number for number in range(200_000))


@functools.cache
def slowness() -> float:
    """Return the slowness of this machine's cores relative to the reference, at least 1."""
    best = float("inf")
    for _ in range(3):
        begun = time.process_time()
        _work()
        best = min(best, time.process_time() - begun)
    return max(1.0, best / REFERENCE_SECONDS)


def load() -> float:
    """Return the number of runnable processes per core, now or in the last minute, at least 1."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    running = 0.0
    try:
        with open("/proc/loadavg") as file:
            running = float(file.read().split()[3].partition("/")[0])
    except OSError:
        pass  # not Linux
    return max(1.0, running / cores, os.getloadavg()[0] / cores)


def factor() -> float:
    """Return the current factor of timeouts. SHARDTRAIN_TEST_PATIENCE multiplies it."""
    return slowness() * 2 * load() * float(os.environ.get("SHARDTRAIN_TEST_PATIENCE", "1"))


def seconds(quiet: float) -> float:
    """Return the current timeout for an operation that needs less than ``quiet`` seconds on an idle machine."""
    return quiet * factor()


def wait_for(
    condition: Callable[[], object], quiet: float, what: str = "it", pause: float = 0.01
) -> None:
    """Wait until ``condition()`` is true, and call it every ``pause`` seconds.

    Raises:
        AssertionError: The condition is still false after ``seconds(quiet)``. The message names ``what``.
    """
    start = time.monotonic()
    limit = seconds(quiet)
    while not condition():
        if time.monotonic() - start > limit:  # the load may have increased meanwhile
            limit = max(limit, seconds(quiet))
            assert time.monotonic() - start <= limit, f"{what} does not come within {limit:.0f} s"
        time.sleep(pause)
