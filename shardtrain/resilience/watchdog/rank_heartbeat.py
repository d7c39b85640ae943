"""Heartbeat of a rank, exchanged as JSON, so reading one cannot run code."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shardtrain.utils.activity import Mark


@dataclass(frozen=True)
class Heartbeat:
    """State of a rank at one moment.

    Attributes:
        beat: Number of this heartbeat.
        host: Host name.
        step: Current step.
        phase: Current phase.
        collective: Function in which the main thread waits, or "".
        at: Line of shardtrain's or the user's code that the main thread executes.
    """

    beat: int
    host: str
    step: int = 0
    phase: str = "start"
    entered: int = 0
    """Number of phases entered, which shows how far the rank is."""
    ticks: int = 0
    """Number of work items within phases plus number of collectives started.

    It only shows that the rank makes progress.
    """
    collective: str = ""
    at: str = ""
    limit_seconds: float = 0.0
    """Maximum time in seconds that this rank may be without progress, or 0 for no limit."""
    is_cold: bool = False
    """True until the end of the first step and during compilation, when being slow is not a hang."""
    has_left: bool = False
    marks: Mapping[int, Mark] = field(default_factory=dict)

    @property
    def progress(self) -> tuple[int, int, int]:
        """Value that changes when the rank makes progress."""
        return self.step, self.entered, self.ticks

    @property
    def waits_in(self) -> str:
        """The collective in which the rank waits, and the line of code that called it."""
        return f"{self.collective} ({self.at})" if self.at else self.collective


def write(sign: Heartbeat) -> str:
    """Serialize a heartbeat as JSON."""
    return json.dumps(asdict(sign), separators=(",", ":"))


def read(text: str | bytes) -> Heartbeat | None:
    """Parse a heartbeat. Return None for any other text, for example from another version.

    >>> read(write(Heartbeat(1, "node7", marks={4: Mark(8, "step 8", 1.5, 0, 3, 9)}))).marks[4].facts
    'step 8'
    >>> read("{}"), read("[1"), read(b'{"beat": 1, "host": "a", "marks": 3}'), read('{"beat": "1", "host": "a"}')
    (None, None, None, None)
    """
    try:
        return _sign(json.loads(text))
    except (ValueError, TypeError, AttributeError):
        return None


def read_many(text: str | bytes) -> dict[int, Heartbeat]:
    """Parse heartbeats by rank. Skip invalid ones.

    >>> sorted(read_many('{"3": {"beat": 1, "host": "a"}, "4": 5, "b": {"beat": 1, "host": "a"}}')), read_many("[")
    ([3], {})
    """
    signs = {}
    with contextlib.suppress(ValueError, AttributeError):
        for rank, fields in json.loads(text).items():
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                signs[int(rank)] = _sign(fields)
    return signs


def _sign(fields: Any) -> Heartbeat:
    # Check types, because the text may come from another version, or from anyone who can reach the store.
    marks_by_grain = fields.pop("marks", {})
    _check(fields, _KINDS)
    marks = {}
    for grain, mark in marks_by_grain.items():
        _check(mark, _KINDS_OF_MARK)
        marks[int(grain)] = Mark(**mark)
    return Heartbeat(**fields, marks=marks)


def _check(fields: dict[str, Any], kinds: Mapping[str, type | tuple[type, ...]]) -> None:
    for name, value in fields.items():
        # An unknown name has no types, so it is rejected, too.
        if not isinstance(value, kinds.get(name, ())):
            raise TypeError(name)


def _kinds(like: object) -> dict[str, type | tuple[type, ...]]:
    """Return the accepted types of each field of an example object. Float fields also accept integers."""
    kinds: dict[str, type | tuple[type, ...]] = {}
    for name, value in vars(like).items():
        kinds[name] = (int, float) if isinstance(value, float) else type(value)
    return kinds


_KINDS = _kinds(Heartbeat(0, ""))
_KINDS_OF_MARK = _kinds(Mark(0, "", 0.0, 0, 0, 0))
