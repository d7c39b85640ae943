"""Control Python's garbage collection: at the same step on all ranks, so no rank waits for another's collector."""

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
    """Disable garbage collection for the block, which creates many objects and no cycles.

    Each collection would visit all objects of the process and free none. This takes up to half of the time.
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
    """Disable garbage collection while the block imports ``module``, and exclude its objects from later collections.

    PyTorch and its dependencies are half a million objects that live as long as the process. Python would
    visit them five times during the import and once before the first step, which takes 0.4 of about 2.5
    s.
    """
    if module in sys.modules:
        yield
        return
    with paused():
        yield
        gc.freeze()


class GarbageCollection:
    """Collect Python's garbage every ``freq`` steps, on all ranks at the same step, and never in between.

    An automatic collection on one rank would make all others wait. ``debug`` runs a full collection every
    step and logs the number of objects. ``close`` (or the end of the context) enables automatic
    collection again.

    Raises:
        ConfigError: ``freq`` is below 1.
    """

    def __init__(self, freq: int, debug: bool = False) -> None:
        if freq < 1:
            raise ConfigError(
                Problem(
                    "training.gc_freq",
                    freq,
                    rule="must be at least 1",
                    fix="set it to 50",
                )
            )
        self._freq = freq
        self._debug = debug
        self._was_enabled = gc.isenabled()
        gc.disable()

    def step(self, step: int) -> None:
        """Collect if it is due. Call it once per training step."""
        if self._debug:
            start = time.perf_counter()
            unreachable = gc.collect()
            seconds = format_seconds(time.perf_counter() - start)
            logger.info(
                f"gc: step {step}: {unreachable} objects in cycles, {len(gc.garbage)} not freed, {seconds}"
            )
        elif step % self._freq == 0:
            # Only the young generations: a full collection visits every object of the process.
            gc.collect(1)

    def close(self) -> None:
        """Enable automatic collection again, if it was enabled before."""
        if self._was_enabled:
            gc.enable()

    def __enter__(self) -> GarbageCollection:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Enable automatic collection again."""
        self.close()
