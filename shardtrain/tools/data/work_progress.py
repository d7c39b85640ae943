"""Progress of reading an input: the share that was read, speed and time left."""

from __future__ import annotations

import time

from shardtrain.utils.heartbeat import not_silent
from shardtrain.utils.progress import Progress
from shardtrain.utils.units import format_count, format_seconds


class WorkProgress(Progress):
    """Progress of reading an input.

    ``total_bytes`` is the size of the input, or None if unknown. ``done`` is the share in 0..1 that an
    earlier run has completed, which does not count in the speed.
    """

    def __init__(self, title: str, total_bytes: int | None, done: float = 0.0) -> None:
        self._total_bytes = total_bytes
        self._done_before = done
        self._started = time.monotonic()
        super().__init__(title, 1.0, done)

    def advance(self, done: float, tokens: int) -> None:
        """Show that the share ``done`` of the input was read.

        ``tokens`` is the number of tokens of this run so far.
        """
        if self.is_live:
            not_silent()
        self.show(done, [f"{100 * done:.1f} %", *self.speeds(done, tokens)])

    def speeds(self, done: float, tokens: int) -> list[str]:
        """Return speed and time left, without those that are unknown."""
        seconds = max(self.seconds, 1e-9)
        parts = []
        if self._total_bytes:
            parts.append(f"{self.megabytes(done) / seconds:.2f} MB/s")
        if tokens:
            parts.append(f"{format_count(round(tokens / seconds))} tokens/s")
        # Work of an earlier run says nothing about the speed of this one.
        share = done - self._done_before
        if share > 0:
            parts.append(f"{format_seconds((1 - done) / share * seconds)} left")
        return parts

    def megabytes(self, done: float) -> float:
        """Return the input of this run in units of 10^6 bytes; 0 if its size is not known."""
        return (self._total_bytes or 0) * (done - self._done_before) / 1e6

    @property
    def seconds(self) -> float:
        """Time since the start of this run."""
        return time.monotonic() - self._started
