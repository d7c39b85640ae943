"""A live progress line below the log on a terminal: step, loss, speed and remaining time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from shardtrain.metrics.record import TOTAL_SPEED, Record
from shardtrain.utils.log import redraw_allowed
from shardtrain.utils.units import format_seconds

if TYPE_CHECKING:
    from rich.table import Table

REDRAW_SECONDS = 0.1
"""Minimum time between two updates, so fast steps do not wait for the terminal."""


class ProgressLine:
    """Draws the line. Log lines appear above it, because the log writes through ``sys.stderr``.

    It has no thread: it draws at the end of a step, and when ``wait`` is called during a long one.
    """

    def __init__(
        self, total_steps: int, start_step: int, clock: Callable[[], float] = time.monotonic, color: bool = True
    ) -> None:
        from rich.console import Console
        from rich.live import Live

        self._total_steps = total_steps
        self._step = start_step
        self._record: Record | None = None
        self._waits = ""
        self._clock = clock
        self._drawn = -float("inf")
        # rich reads NO_COLOR itself
        self._console = Console(stderr=True, no_color=True if not color else None)
        self._live = Live(
            self._render(), console=self._console, auto_refresh=False, transient=True, redirect_stdout=True
        )
        self._live.start()

    def step(self, step: int, record: Record | None = None) -> None:
        """Move to ``step``. ``record`` is its record if the step was logged."""
        self._step = step
        self._waits = ""
        self._record = record or self._record
        now = self._clock()
        if record is not None or now - self._drawn >= REDRAW_SECONDS:
            self._drawn = now
            self._live.update(self._render(), refresh=True)

    def wait(self, what: str) -> None:
        """Show ``what`` instead of the step number, until the next step."""
        self._waits = what
        self._live.update(self._render(), refresh=True)

    def close(self) -> None:
        """Remove the line."""
        self._live.stop()

    def _render(self) -> Table:
        """Render the line for rich."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        words = texts(self._step, self._total_steps, self._record)
        words[0] = self._waits or words[0]
        # Drop columns, two cells apart, until the line fits: a wrapped line cannot be redrawn.
        room = self._console.width - 2 * len(words)
        while len(words) > 1 and sum(map(len, words)) > room:
            room += 2
            words.pop()
        table = Table.grid(padding=(0, 2))
        bar = min(24, room - sum(map(len, words)))
        drawn = [ProgressBar(total=max(self._total_steps, 1), completed=self._step, width=bar)] if bar >= 4 else []
        for _ in (*drawn, *words):
            table.add_column(no_wrap=True)
        table.add_row(*drawn, *words)
        return table


def texts(step: int, total_steps: int, record: Record | None) -> list[str]:
    """Return the columns of the line: the step, and loss, speed and remaining time of the last logged step."""
    words = [f"step {step}/{total_steps}"]
    if record is not None:
        left = (total_steps - step) * record.step_seconds
        words += [
            f"loss {record.loss:.4f}" if record.has_targets else "no targets",
            f"{record.tokens_per_second:,.0f} {TOTAL_SPEED}",
            f"{format_seconds(left)} left",
        ]
    return words


def progress_allowed(stream: TextIO | None = None) -> bool:
    """True if the stream is a terminal that can redraw a line, with or without colors."""
    return redraw_allowed(stream or sys.stderr)
