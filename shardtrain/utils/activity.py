"""Activity of this process: seconds per phase, and counts of steps and pieces of work.

Each second of a run belongs to exactly one phase. The goodput is computed from phases, and a report of
a hung rank names its phase. The watchdog reads the counts to detect progress.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["start", "compile", "data", "step", "validation", "checkpoint", "end"]
"""start: until the first step; compile: the first step, which compiles and warms up; step: forward, backward, update;
data, validation, checkpoint: waiting for them; end: after the last step."""


class Phases:
    """One clock per phase. The time of an inner phase does not count for the outer one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.name: Phase = "start"
        self.entered = 0
        """How many phases were entered: equal on ranks that have come equally far."""
        self._clock = clock
        self._since = clock()
        self._seconds: dict[Phase, float] = {}

    def begin(self, name: Phase) -> None:
        """End the current phase and start another."""
        now = self._clock()
        self._seconds[self.name] = self._seconds.get(self.name, 0.0) + now - self._since
        self.name = name
        self._since = now
        self.entered += 1

    @contextlib.contextmanager
    def within(self, name: Phase) -> Iterator[None]:
        """Enter a phase, and return to the previous one at the end.

        >>> ticks = iter(range(9))
        >>> phases = Phases(lambda: next(ticks))
        >>> with phases.within("validation"), phases.within("data"): pass
        >>> phases.seconds()
        {'start': 2.0, 'validation': 2.0, 'data': 1.0}
        """
        # Phases may be nested, and may end with an exception.
        before = self.name
        self.begin(name)
        try:
            yield
        finally:
            self.begin(before)

    def seconds(self) -> dict[Phase, float]:
        """Seconds in each phase until now; their sum is the age of this object."""
        seconds = dict(self._seconds)
        seconds[self.name] = seconds.get(self.name, 0.0) + self._clock() - self._since
        return seconds


GRAINS = (1, 16, 256)
"""Marks are kept at multiples of ``mark_steps`` times these. Ranks that are read at different moments then
have a mark in common, even if steps are short."""


@dataclass(frozen=True)
class Mark:
    """Snapshot of this process at the beginning of a step that all ranks begin together."""

    begun: int
    """Steps begun by this process. Equal on all ranks, even if their counters differ."""
    facts: str
    """Counters that must be equal on all ranks at this point, as text."""
    seconds: float
    """The watcher's clock: seconds in which it has sampled."""
    busy_data: int
    """Samples that found the main thread busy with data."""
    busy_step: int
    """Samples that found it busy with the step, and in no collective."""
    samples: int


@dataclass
class Moving:
    """Progress counters of one process, which the watchdog reads. ``mark_steps`` is 0 if nobody reads marks."""

    ticks: int = 0
    """Pieces of work within phases, such as a validation batch or a piece of a file."""
    step: int = 0
    """The current step; 1 is the first step of the run."""
    done: int = 0
    """The last completed step; 0 before this process has completed one."""
    begun: int = 0
    may_be_slow: bool = False
    """True during work of unknown duration."""
    mark_steps: int = 0
    marks: dict[int, Mark] = field(default_factory=dict)
    seconds: float = 0.0
    busy_data: int = 0
    busy_step: int = 0
    samples: int = 0
    measures: dict[str, float] = field(default_factory=dict)
    """Metrics that the watchdog adds to the log."""


_now = Moving()


def now() -> Moving:
    """Return the progress counters of this process."""
    return _now


def restart(mark_steps: int) -> Moving:
    """Reset the counters, because a fork inherits those of its parent."""
    global _now
    _now = Moving(mark_steps=mark_steps)
    return _now


def tick() -> None:
    """Count a finished piece of work within a phase."""
    _now.ticks += 1


@contextlib.contextmanager
def slow() -> Iterator[None]:
    """Apply the time limits of a start to work of unknown duration, such as writing a trace."""
    _now.may_be_slow = True
    try:
        yield
    finally:
        _now.may_be_slow = False


def begin_step(step: int, facts: Mapping[str, object]) -> None:
    """Count the beginning of a step. ``facts`` are counters that must be equal on all ranks."""
    m = _now
    m.step = step
    m.begun += 1
    # Without a watchdog, marks cost nothing.
    if not m.mark_steps:
        return
    for grain in GRAINS:
        # Coarse marks stay available longer than fine ones.
        if m.begun % (grain * m.mark_steps) != 0:
            continue
        text = ", ".join(f"{name} {value}" for name, value in facts.items())
        # a mark is one object that replaces the one before: threads that read it never see half of it
        m.marks[grain] = Mark(m.begun, text, m.seconds, m.busy_data, m.busy_step, m.samples)
