"""When Python collects garbage: at the same step on all ranks, so that none waits for another's collector."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger
from shardtrain.utils.units import format_seconds


@contextmanager
def paused() -> Iterator[None]:
    """Python collects nothing inside: where many objects are made and none in cycles, collections are half the time.

    Each looks at all objects of the process again, and finds none to free.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def importing(module: str) -> Iterator[None]:
    """Python collects nothing while ``module`` and what it needs are imported, and never looks at that again.

    PyTorch and what comes with it are half a million objects that stay as long as the process. To look through them
    five times while they are made, and once more before the first step, is 0.4 of some 2.5 s.
    """
    if module in sys.modules:
        yield
        return
    with paused():
        yield
        gc.freeze()


class GarbageCollection:
    """Collects Python's garbage every ``freq`` steps, on all ranks at the same step, and never in between.

    A collection that starts by itself on one rank makes all others wait. ``debug`` collects everything every step
    and logs what was found. ``close`` (or the end of the context) gives the collector back to Python. Raises
    ConfigError for a ``freq`` below 1.
    """

    def __init__(self, freq: int, debug: bool = False) -> None:
        if freq < 1:
            raise ConfigError(Problem("training.gc_freq", freq, "must be at least 1", "set it to 50"))
        self._freq = freq
        self._debug = debug
        self._was_enabled = gc.isenabled()
        gc.disable()

    def step(self, step: int) -> None:
        """Collect where it is due; call it once per training step."""
        if self._debug:
            start = time.perf_counter()
            unreachable = gc.collect()
            seconds = format_seconds(time.perf_counter() - start)
            logger.info(f"gc: step {step}: {unreachable} objects in cycles, {len(gc.garbage)} not freed, {seconds}")
        elif step % self._freq == 0:
            # The young generations only: a full collection walks every object of the process.
            gc.collect(1)

    def close(self) -> None:
        """Let Python collect by itself again, if it did before."""
        if self._was_enabled:
            gc.enable()

    def __enter__(self) -> GarbageCollection:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give the collector back."""
        self.close()
