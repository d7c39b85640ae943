"""The lines of ``goodput.jsonl``: what an attempt of a run was doing until when, and when it died.

A file is appended to, one write per line, so that a process that is killed loses what it did since its last line and
nothing else. The launcher may add a line of its own; see ``Death``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from shardtrain.utils import activity, atomic_io, bounded_reads, checked_json
from shardtrain.utils.errors import DataError

FILE = "goodput.jsonl"
MAX_BYTES = 2**28
"""Of a file: a million events."""
_PHASES = get_args(activity.Phase)


@dataclass(frozen=True)
class Start:
    """An attempt is about to take its first step, after ``step``; times are seconds since the epoch."""

    attempt: str
    job: str
    """The command that this attempt belongs to: a gap between two attempts of one is a restart."""
    job_started: float
    started: float
    """When the process of rank 0 began."""
    step: int
    world_size: int
    restarts: int


@dataclass(frozen=True)
class AttemptProgress:
    """What an attempt has done by now: seconds of each phase since it started."""

    attempt: str
    time: float
    step: int
    saves: int
    seconds: dict[str, float] = field(default_factory=dict)
    ended: bool = False
    """The last line of an attempt that could still write one."""
    saved_step: int = 0
    """The newest step of which there is a checkpoint; one that is written beside training is there some steps later."""


@dataclass(frozen=True)
class Death:
    """The launcher saw a rank of this job fail at ``time``."""

    job: str
    time: float


Event = Start | AttemptProgress | Death
KINDS: dict[str, type[Start] | type[AttemptProgress] | type[Death]] = {
    "start": Start,
    "progress": AttemptProgress,
    "death": Death,
}


def line(event: Event) -> bytes:
    """One line of the file.

    >>> line(Death("a1", 5.0))
    b'{"kind": "death", "job": "a1", "time": 5.0}\\n'
    """
    kind = next(name for name, known in KINDS.items() if type(event) is known)
    return json.dumps({"kind": kind, **asdict(event)}, allow_nan=False).encode() + b"\n"


def parse(text: bytes) -> Event:
    """The event of one line; raises ValueError for anything else than what ``line`` writes.

    >>> parse(line(Death("a1", 5.0)))
    Death(job='a1', time=5.0)
    """
    try:
        fields_of = checked_json.parse(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(fields_of, dict) or not isinstance(fields_of.get("kind"), str) or fields_of["kind"] not in KINDS:
        raise ValueError("no event")
    known = KINDS[fields_of.pop("kind")]
    if fields_of.keys() != {one.name for one in fields(known)}:
        raise ValueError("not the fields of its kind")
    for one in fields(known):
        _check(one.name, str(one.type), fields_of[one.name])
    return known(**fields_of)


def read(folder: Path) -> tuple[list[Event], int]:
    """The events of a run folder in their order, and how many lines are none (a kill may tear one).

    Raises:
        DataError: there is no such file, or it cannot be read.
    """
    path = folder / FILE
    try:
        content = bounded_reads.whole(path, MAX_BYTES)
    except OSError as error:
        rule = f"{path} cannot be read ({error.strerror})"
        raise DataError(f"{rule}; give the folder of a run (job.dump_folder) that has trained a step") from error
    events: list[Event] = []
    bad = 0
    for text in content.split(b"\n"):
        if not text.strip():
            continue
        try:
            events.append(parse(text))
        except ValueError:
            bad += 1
    return events, bad


def append(path: Path, event: Event) -> None:
    """Add one line, on a line of its own whatever a kill or a full disk left; raises OSError."""
    # the folder may have been deleted during the run
    descriptor = atomic_io.open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644, create_folder=True)
    try:
        # a line that a kill has cut short must not swallow this one
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        content = b"\n" * torn + line(event)
        if os.write(descriptor, content) != len(content):
            raise OSError(f"cannot write a whole line to {path}")
    finally:
        os.close(descriptor)


def _check(name: str, kind: str, value: Any) -> None:
    good = {
        "str": lambda: isinstance(value, str),
        "bool": lambda: isinstance(value, bool),
        "int": lambda: type(value) is int and 0 <= value < 2**62,
        "float": lambda: _is_seconds(value),
        "dict[str, float]": lambda: _are_phases(value),
    }[kind]()
    if not good:
        raise ValueError(f"{name} is not a {kind}")


def _is_seconds(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value < 1e12  # type: ignore[arg-type, operator]


def _are_phases(value: object) -> bool:
    return isinstance(value, Mapping) and all(name in _PHASES and _is_seconds(value[name]) for name in value)
