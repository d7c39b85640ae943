"""What a rank says of itself with each beat: JSON through the store, never anything that runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from shardtrain.resilience.progress import Mark


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life. ``collective`` is the function that the main thread waits in, ``at`` its place in our code."""

    beat: int
    host: str
    step: int = 0
    phase: str = "start"
    entered: int = 0
    """Phases entered: how far the rank has come."""
    ticks: int = 0
    """Pieces of work done within phases: that it moves, not how far."""
    collective: str = ""
    at: str = ""
    limit_seconds: float = 0.0
    """How long this rank may stand where it stands."""
    is_cold: bool = False
    """Before the end of the first step, or compiling: slow alone is not a hang there."""
    has_left: bool = False
    marks: Mapping[int, Mark] = field(default_factory=dict)

    @property
    def progress(self) -> tuple[int, int, int]:
        """Changes when the rank moves."""
        return self.step, self.entered, self.ticks

    @property
    def waits_in(self) -> str:
        """The collective and the line of ours that called it."""
        return f"{self.collective} ({self.at})" if self.at else self.collective


def write(sign: Heartbeat) -> str:
    """A sign as JSON."""
    return json.dumps(asdict(sign), separators=(",", ":"))


def read(text: str | bytes) -> Heartbeat | None:
    """The sign in a text, or None where it is none: another version or another program wrote it.

    >>> read(write(Heartbeat(1, "node7", marks={4: Mark(8, "step 8", 1.5, 0, 3, 9)}))).marks[4].facts
    'step 8'
    >>> read("{}"), read("[1"), read(b'{"beat": 1, "host": "a", "marks": 3}'), read('{"beat": "1", "host": "a"}')
    (None, None, None, None)
    """
    try:
        fields = json.loads(text)
        marks = {int(grain): Mark(**mark) for grain, mark in fields.pop("marks", {}).items()}
        sign = Heartbeat(**fields, marks=marks)
        _check(sign, Heartbeat(0, ""))
        for mark in marks.values():
            _check(mark, Mark(0, "", 0.0, 0, 0, 0))
    except (ValueError, TypeError, AttributeError):
        return None
    return sign


def _check(found: object, like: object) -> None:
    for name, value in vars(like).items():
        if not isinstance(getattr(found, name), (int, float) if isinstance(value, float) else type(value)):
            raise TypeError(name)
