"""What a rank says of itself with each beat: JSON through the store, never anything that runs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shardtrain.utils.activity import Mark


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
    """Pieces of work done within phases, and collectives begun: that it moves, not how far."""
    collective: str = ""
    at: str = ""
    limit_seconds: float = 0.0
    """How long this rank may be without progress."""
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
        return _sign(json.loads(text))
    except (ValueError, TypeError, AttributeError):
        return None


def read_many(text: str | bytes) -> dict[int, Heartbeat]:
    """The signs by rank in a text, without those that are none.

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
    # types are checked: the text may come from another version, or from a stranger who can reach the store
    marks_by_grain = fields.pop("marks", {})
    _check(fields, _KINDS)
    marks = {}
    for grain, mark in marks_by_grain.items():
        _check(mark, _KINDS_OF_MARK)
        marks[int(grain)] = Mark(**mark)
    return Heartbeat(**fields, marks=marks)


def _check(fields: dict[str, Any], kinds: Mapping[str, type | tuple[type, ...]]) -> None:
    for name, value in fields.items():
        # an unknown name has no types, and is refused too
        if not isinstance(value, kinds.get(name, ())):
            raise TypeError(name)


def _kinds(like: object) -> dict[str, type | tuple[type, ...]]:
    return {name: (int, float) if isinstance(value, float) else type(value) for name, value in vars(like).items()}


_KINDS = _kinds(Heartbeat(0, ""))
_KINDS_OF_MARK = _kinds(Mark(0, "", 0.0, 0, 0, 0))
