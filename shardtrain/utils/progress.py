"""Progress of long work: a live line on a terminal that can redraw, and a printed line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from shardtrain.utils.heartbeat import last_printed, not_silent, silent_since
from shardtrain.utils.log import redraw_allowed

if TYPE_CHECKING:
    from rich.table import Table

LINE_SECONDS = 4.0
"""Time between two printed lines.

It is shorter than that of a heartbeat, which prints if this class does not.
"""
REDRAW_SECONDS = 0.1
"""Minimum time between two updates of the live line, so fast work does not wait for the terminal."""
_BAR_COLUMNS = 24


class Progress:
    """Progress of one task. Use it as a context manager, or call ``close``.

    It has no thread, so a process that shows progress may fork. Log lines appear above the live line,
    because the log writes through ``sys.stderr``.

    Attributes:
        is_live: True if a live line is drawn on a terminal.
    """

    def __init__(
        self, title: str, total: float = 1.0, completed: float = 0.0, color: bool = True
    ) -> None:
        self.is_live = redraw_allowed(sys.stderr)
        self._title = title
        self._total = total
        self._completed = completed
        self._details: list[str] = []
        self._drawn = -float("inf")
        self._said = silent_since()
        if self.is_live:
            from rich.console import Console
            from rich.live import Live

            # rich reads NO_COLOR itself
            self._console = Console(stderr=True, no_color=None if color else True)
            self._live = Live(
                self._render(),
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=True,
            )
            self._live.start()

    def show(self, completed: float, details: Sequence[str], at_once: bool = False) -> None:
        """Show that ``completed`` of the total is complete, followed by ``details``.

        The last details are dropped if space is short. Draws or prints only if enough time has passed.
        ``at_once`` always redraws a live line.
        """
        self._completed = completed
        self._details = list(details)
        now = time.monotonic()
        if self.is_live:
            if at_once or now - self._drawn >= REDRAW_SECONDS:
                self._drawn = now
                self._live.update(self._render(), refresh=True)
        elif now - max(self._said, last_printed()) >= LINE_SECONDS:
            self._said = now
            not_silent()
            print(f"{self._title}: {', '.join(details)}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the live line."""
        if self.is_live:
            self._live.stop()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the live line."""
        self.close()

    def _render(self) -> Table:
        """Return the line for rich: bar, title and details."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        texts = [text for text in (self._title, *self._details) if text]
        # Drop columns, two cells apart, until the line fits. A wrapped line cannot be redrawn.
        room = self._console.width - 2 * len(texts)
        while len(texts) > 1 and sum(map(len, texts)) > room:
            room += 2
            texts.pop()
        table = Table.grid(padding=(0, 2))
        columns = min(_BAR_COLUMNS, room - sum(map(len, texts)))
        bars = []
        if columns >= 4:
            bars = [
                ProgressBar(total=max(self._total, 1e-9), completed=self._completed, width=columns)
            ]
        for _ in (*bars, *texts):
            table.add_column(no_wrap=True)
        table.add_row(*bars, *texts)
        return table
