"""How far a long piece of work is: a bar on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from shardtrain.utils.heartbeat import last_said, not_silent, silent_since
from shardtrain.utils.log import redraw_allowed
from shardtrain.utils.units import format_count, format_seconds

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

LINE_SECONDS = 4.0
"""Time between two lines where there is no terminal; less than a heartbeat's, which speaks where this says nothing."""


class Progress:
    """Shows a share of work done, its speed, and the time left.

    ``total_bytes`` is the size of the input (None where it is not known), ``done`` the share that an earlier run did,
    0..1, which does not count in the speed.
    """

    def __init__(self, title: str, total_bytes: int | None, done: float = 0.0) -> None:
        self._title = title
        self._total_bytes = total_bytes
        self._done_before = done
        self._started = time.monotonic()
        self._said = silent_since()
        self._bar: RichProgress | None = None
        if redraw_allowed(sys.stderr):
            self._bar = _bar(title)
            self._task = self._bar.add_task(title, total=1.0, words="")
            self._bar.update(self._task, completed=done)
            self._bar.start()

    def show(self, done: float, tokens: int) -> None:
        """Say that a share ``done`` of all is done, 0..1, and ``tokens`` came out of it since the start of this run."""
        if self._bar is not None:
            not_silent()
            self._bar.update(self._task, completed=done, words=self.words(done, tokens))
        elif time.monotonic() - max(self._said, last_said()) >= LINE_SECONDS:
            self._said = time.monotonic()
            not_silent()
            print(f"{self._title}: {100 * done:.1f} %, {self.words(done, tokens)}", file=sys.stderr, flush=True)

    def words(self, done: float, tokens: int) -> str:
        """Speed and time left."""
        seconds = max(self.seconds, 1e-9)
        share = done - self._done_before
        parts = [f"{self.megabytes(done) / seconds:.2f} MB/s"] if self._total_bytes else []
        if tokens:
            parts.append(f"{format_count(round(tokens / seconds))} tokens/s")
        if share > 0:
            parts.append(f"{format_seconds((1 - done) / share * seconds)} left")
        return ", ".join(parts)

    def megabytes(self, done: float) -> float:
        """Input of this run in units of 10^6 bytes; 0 where its size is not known."""
        return (self._total_bytes or 0) * (done - self._done_before) / 1e6

    @property
    def seconds(self) -> float:
        """Time since the start of this run."""
        return time.monotonic() - self._started

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()


def _bar(title: str) -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    return Progress(
        TextColumn(title),
        BarColumn(),
        TaskProgressColumn("{task.percentage:>5.1f} %"),
        TextColumn("{task.fields[words]}"),
        console=Console(stderr=True),
        transient=True,
    )
