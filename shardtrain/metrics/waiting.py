"""What a run does while it logs nothing, so that a slow step looks different from a run that is dead.

A line on the console after some seconds without any; on a terminal the live line counts the seconds in place of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from shardtrain.metrics.progress_line import ProgressLine
from shardtrain.utils import log
from shardtrain.utils.heartbeat import asked_seconds
from shardtrain.utils.units import format_seconds

_REDRAW_SECONDS = 1.0
"""Between two drawings of a live line that counts seconds."""
_SHORT_SECONDS = 2.0
"""Steps up to so long move by themselves."""


class Waiting:
    """Tells the step or the phase that the run is in, and for how long.

    ``phase`` gives the name of the phase, see ``utils.activity``; ``seconds`` of silence come before a line, 0
    means none. ``compiles``: the first step compiles the model.
    """

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
        self.seconds = asked_seconds() if seconds is None else seconds
        self._total_steps = total_steps
        self._step = step
        self._phase = phase
        self._progress = progress
        self._clock = clock
        self._compiles = compiles
        self._seen = phase()
        self._since = clock()
        self._said = _LastSaid(clock)
        log.logger.addHandler(self._said)

    def step(self, step: int) -> None:
        """This step has ended."""
        self._step = step
        self._since = self._clock()

    def tell(self) -> float:
        """Print or draw what is due; gives the seconds until it is worth to be called again."""
        now = self._clock()
        phase = self._phase()
        if _place(phase) != _place(self._seen):
            self._since = now
        self._seen = phase
        waited = now - self._since
        # On a terminal the live line counts the seconds; elsewhere a line comes after some seconds without any.
        if self._progress is not None:
            if waited >= _SHORT_SECONDS:
                self._progress.wait(self.text(phase, waited))
            return _REDRAW_SECONDS
        if now - self._said.seconds >= self.seconds:
            log.logger.info(self.text(phase, waited), extra={"console_only": True})
            self._said.seconds = now
        return min(_REDRAW_SECONDS, self._said.seconds + self.seconds - now)

    def text(self, phase: str, waited: float) -> str:
        """Such as ``step 41/5000: 20s``; without the time where the step has just begun."""
        step = f"step {self._step + 1}/{self._total_steps}"
        place = {
            "compile": f"first step ({self._step + 1}/{self._total_steps}){', compiling' if self._compiles else ''}",
            "data": f"{step}, waiting for data",
            "validation": f"validation after step {self._step}",
            "checkpoint": f"saving step {self._step}",
            "end": f"ending after step {self._step}",
        }.get(phase, step)
        return f"{place}: {format_seconds(round(waited))}" if waited >= 1 else place

    def close(self) -> None:
        """Listen no more."""
        log.logger.removeHandler(self._said)


def _place(phase: str) -> str:
    """What the time counts for: a step waits for its data within it."""
    return "step" if phase in ("compile", "data") else phase


class _LastSaid(logging.Handler):
    """When the log had its last line."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self.seconds = clock()

    def emit(self, record: logging.LogRecord) -> None:
        """A line was logged."""
        self.seconds = self._clock()
