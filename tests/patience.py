"""How long a test waits: limits are written for a quiet machine, and grow with what else the machine does.

No law is about how fast a machine is. A limit is there to end what would never end, so being too long costs nothing
but the time of a failure.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable

REFERENCE_SECONDS = 0.015
"""CPU time of ``_work`` on the machine for which the limits are written: a core of a server of 2023."""


def _work() -> int:
    return sum(number * number for number in range(200_000))


@functools.cache
def slowness() -> float:
    """How many times slower than the reference a core is; at least 1."""
    best = float("inf")
    for _ in range(3):
        begun = time.process_time()
        _work()
        best = min(best, time.process_time() - begun)
    return max(1.0, best / REFERENCE_SECONDS)


def load() -> float:
    """Processes that want a core, for each core: the larger of now and of the last minute; at least 1."""
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
    """By what a limit is longer now than on a quiet machine; SHARDTRAIN_TEST_PATIENCE multiplies it."""
    return slowness() * 2 * load() * float(os.environ.get("SHARDTRAIN_TEST_PATIENCE", "1"))


def seconds(quiet: float) -> float:
    """How long to wait now for what a quiet machine does well within ``quiet`` seconds."""
    return quiet * factor()


def wait_for(condition: Callable[[], object], quiet: float, what: str = "it", pause: float = 0.01) -> None:
    """Return once ``condition()``, asked every ``pause`` seconds, is true.

    AssertionError that ``what`` does not come after ``seconds(quiet)``, with the load of then.
    """
    begun, limit = time.monotonic(), seconds(quiet)
    while not condition():
        if time.monotonic() - begun > limit:  # it may be busier than it was
            limit = max(limit, seconds(quiet))
            assert time.monotonic() - begun <= limit, f"{what} does not come within {limit:.0f} s"
        time.sleep(pause)
