"""Report the activity of a run during slow steps, so users see that it is alive.

On a terminal, the live line counts the seconds. Elsewhere, a line is printed after some seconds without
output.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from shardtrain.metrics.progress_line import ProgressLine
from shardtrain.utils import log
from shardtrain.utils.heartbeat import silence_seconds
from shardtrain.utils.units import format_seconds

_REDRAW_SECONDS = 1.0
"""Interval at which the live line is redrawn."""
_SHORT_SECONDS = 2.0
"""Steps shorter than this need no counter of seconds, because the live line changes with each step."""


class Waiting:
    """Reports the current step or phase of a run, and its duration so far."""

    def __init__(
        self,
        total_steps: int,
        step: int,
        phase: Callable[[], str],
        progress: ProgressLine | None = None,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        compiles: bool = False,
    ) -> None:
        """Configure the report.

        Args:
            total_steps: number of steps of the run.
            step: last finished step.
            phase: returns the name of the current phase, see ``utils.activity``.
            progress: the live line, or None without a terminal.
            seconds: time without output before a line is printed. By default from the environment.
            clock: returns seconds.
            compiles: True if the first step compiles the model.
        """
        self.seconds = silence_seconds() if seconds is None else seconds
        self._total_steps = total_steps
        self._step = step
        self._phase = phase
        self._progress = progress
        self._clock = clock
        self._compiles = compiles
        # The phase at the last call, and the time since which it has lasted.
        self._seen = phase()
        self._since = clock()
        self._last_line = _LastLine(clock)
        log.logger.addHandler(self._last_line)

    def step(self, step: int) -> None:
        """Record that this step has ended."""
        self._step = step
        self._since = self._clock()

    def tell(self) -> float:
        """Print or redraw the report if it is due.

        Return the number of seconds until the next call is needed.
        """
        now = self._clock()
        phase = self._phase()
        # A new activity starts its own clock.
        if _place(phase) != _place(self._seen):
            self._since = now
        self._seen = phase
        waited = now - self._since
        # On a terminal the live line shows the time. Otherwise a line is logged after some silence.
        if self._progress is not None:
            if waited >= _SHORT_SECONDS:
                self._progress.wait(self.text(phase, waited))
            return _REDRAW_SECONDS
        if now - self._last_line.seconds >= self.seconds:
            log.logger.info(self.text(phase, waited), extra={"console_only": True})
            self._last_line.seconds = now
        return min(_REDRAW_SECONDS, self._last_line.seconds + self.seconds - now)

    def text(self, phase: str, waited: float) -> str:
        """Return a text such as ``step 41/5000: 20s``. Omit the time if the step has just started."""
        number = f"{self._step + 1}/{self._total_steps}"
        step = f"step {number}"
        compiling = ", compiling" if self._compiles else ""
        place = {
            "compile": f"first step ({number}){compiling}",
            "data": f"{step}, waiting for data",
            "validation": f"validation after step {self._step}",
            "checkpoint": f"saving step {self._step}",
            "end": f"ending after step {self._step}",
        }.get(phase, step)
        # A step of less than a second is not slow.
        return f"{place}: {format_seconds(round(waited))}" if waited >= 1 else place

    def close(self) -> None:
        """Stop watching the log."""
        log.logger.removeHandler(self._last_line)


def _place(phase: str) -> str:
    """Return the activity whose duration is shown. Waiting for data and compiling are part of a step."""
    return "step" if phase in ("compile", "data") else phase


class _LastLine(logging.Handler):
    """Log handler that records the time of the last log line."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self.seconds = clock()

    def emit(self, record: logging.LogRecord) -> None:
        """Record the time of a log line."""
        self.seconds = self._clock()
