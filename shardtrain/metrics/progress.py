"""A live line under the log on a terminal: step, loss, speed and time left. Elsewhere there is none."""

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
"""Least time between two drawings, so that fast steps do not wait for the terminal."""


class Progress:
    """Draws the line; log lines appear above it, whole, because the log writes through ``sys.stderr``.

    No thread of its own: it draws when a step ends, and when ``wait`` is called during a long one.
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
        # rich asks NO_COLOR itself
        self._console = Console(stderr=True, no_color=True if not color else None)
        self._live = Live(
            self._render(), console=self._console, auto_refresh=False, transient=True, redirect_stdout=True
        )
        self._live.start()

    def step(self, step: int, record: Record | None = None) -> None:
        """Move to ``step``; ``record`` where this step was logged."""
        self._step = step
        self._waits = ""
        self._record = record or self._record
        now = self._clock()
        if record is not None or now - self._drawn >= REDRAW_SECONDS:
            self._drawn = now
            self._live.update(self._render(), refresh=True)

    def wait(self, what: str) -> None:
        """Show ``what`` in place of the step, until the next step."""
        self._waits = what
        self._live.update(self._render(), refresh=True)

    def close(self) -> None:
        """Take the line away."""
        self._live.stop()

    def _render(self) -> Table:
        """The line as rich draws it."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        words = texts(self._step, self._total_steps, self._record)
        words[0] = self._waits or words[0]
        # Words go until the line fits, two columns between each: a line that wraps could not be drawn again.
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
    """The words of the line: where the run is, and the loss, speed and time left of the last logged step."""
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
    """Whether a live line may be drawn: a terminal that can redraw it. Colours are another matter."""
    return redraw_allowed(stream or sys.stderr)
