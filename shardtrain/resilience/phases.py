"""What this process is doing, and for how long it has: each second of a run belongs to exactly one phase.

The goodput of a run is made of these seconds, and a rank that hangs is described by the phase that it is in.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Literal

Phase = Literal["start", "compile", "data", "step", "validation", "checkpoint", "end"]
"""start: until the first step; compile: the first step, which compiles and warms up; step: forward, backward, update;
data, validation, checkpoint: waiting for them; end: after the last step."""


class Phases:
    """A clock for each phase; the time of an inner phase is not its outer's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.name: Phase = "start"
        self.entered = 0
        """How many phases were entered: equal on ranks that have come equally far."""
        self._clock, self._since = clock, clock()
        self._seconds: dict[Phase, float] = {}

    def begin(self, name: Phase) -> None:
        """The phase before has ended."""
        now = self._clock()
        self._seconds[self.name] = self._seconds.get(self.name, 0.0) + now - self._since
        self.name, self._since, self.entered = name, now, self.entered + 1

    @contextlib.contextmanager
    def within(self, name: Phase) -> Iterator[None]:
        """Be in a phase, and then in the one before again.

        >>> ticks = iter(range(9))
        >>> phases = Phases(lambda: next(ticks))
        >>> with phases.within("validation"), phases.within("data"): pass
        >>> phases.seconds()
        {'start': 2.0, 'validation': 2.0, 'data': 1.0}
        """
        before = self.name
        self.begin(name)
        try:
            yield
        finally:
            self.begin(before)

    def seconds(self) -> dict[Phase, float]:
        """Seconds in each phase until now; their sum is the age of this object."""
        found = dict(self._seconds)
        found[self.name] = found.get(self.name, 0.0) + self._clock() - self._since
        return found
