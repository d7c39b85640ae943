"""Read and write ``goodput.jsonl``: start, progress and death of each attempt of a run.

Each line is appended with one write, so a killed process loses only the time since its last line. The
launcher may also append a line, see ``Death``.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from shardtrain.utils import activity, atomic_io, bounded_reads, checked_json
from shardtrain.utils.errors import DataError

FILE = "goodput.jsonl"
MAX_BYTES = 2**28
"""Maximum size of a file in bytes."""
MAX_EVENTS = 1_000_000
"""Maximum number of events. A run adds one per attempt, and one every few seconds."""
_PHASES = get_args(activity.Phase)


@dataclass(frozen=True)
class Start:
    """Start of an attempt, after step ``step``. Times are seconds since the epoch."""

    attempt: str
    job: str
    """ID of the command of this attempt. A gap between two attempts of one command is a restart."""
    job_started: float
    started: float
    """Start time of the process of rank 0, in seconds since the epoch."""
    step: int
    world_size: int
    restarts: int


@dataclass(frozen=True)
class AttemptProgress:
    """Progress of an attempt: seconds of each phase since its start."""

    attempt: str
    time: float
    step: int
    saves: int
    seconds: dict[str, float] = field(default_factory=dict)
    ended: bool = False
    """True in the last line of an attempt that ended normally."""
    saved_step: int = 0
    """Step of the newest complete checkpoint. A background save completes some steps after the saved step."""


@dataclass(frozen=True)
class Death:
    """Failure of a rank of the job ``job`` at ``time``, recorded by the launcher."""

    job: str
    time: float


Event = Start | AttemptProgress | Death
KINDS: dict[str, type[Start] | type[AttemptProgress] | type[Death]] = {
    "start": Start,
    "progress": AttemptProgress,
    "death": Death,
}


def line(event: Event) -> bytes:
    """Return one line of the file.

    >>> line(Death("a1", 5.0))
    b'{"kind": "death", "job": "a1", "time": 5.0}\\n'
    """
    kind = next(name for name, known in KINDS.items() if type(event) is known)
    return json.dumps({"kind": kind, **asdict(event)}, allow_nan=False).encode() + b"\n"


def parse(text: bytes) -> Event:
    """Parse one line. Raises ValueError unless it has the format of ``line``.

    >>> parse(line(Death("a1", 5.0)))
    Death(job='a1', time=5.0)
    """
    try:
        fields_of = checked_json.parse(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if (
        not isinstance(fields_of, dict)
        or not isinstance(fields_of.get("kind"), str)
        or fields_of["kind"] not in KINDS
    ):
        raise ValueError("no event")
    known = KINDS[fields_of.pop("kind")]
    if fields_of.keys() != {one.name for one in fields(known)}:
        raise ValueError("not the fields of its kind")
    for one in fields(known):
        _check(one.name, str(one.type), fields_of[one.name])
    return known(**fields_of)


def read(folder: Path) -> tuple[list[Event], int]:
    """Return the events of a run folder in order, and the number of invalid lines,
    such as a line torn by a kill.

    Raises:
        DataError: the file does not exist, or it cannot be read.
    """
    path = folder / FILE
    try:
        content = bounded_reads.read_all(path, MAX_BYTES)
    except OSError as error:
        rule = f"{path} cannot be read ({error.strerror})"
        raise DataError(
            f"{rule}; name the folder of a run (job.dump_folder) that has trained a step",
        ) from error
    events: list[Event] = []
    bad = 0
    for text in io.BytesIO(content):
        if not text.strip():
            continue
        if len(events) == MAX_EVENTS:
            raise DataError(f"{path} has more than {MAX_EVENTS} events; remove old ones")
        try:
            events.append(parse(text))
        except ValueError:
            bad += 1
    return events, bad


def append(path: Path, event: Event) -> None:
    """Append a line. If a kill or a full disk has torn the last line, end it first. Raises OSError."""
    # The folder may have been deleted during the run.
    descriptor = atomic_io.open_file(
        path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644, create_folder=True
    )
    try:
        # End a line that a kill has truncated. Otherwise the new line would be joined with it.
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        content = b"\n" * torn + line(event)
        if os.write(descriptor, content) != len(content):
            raise OSError(f"cannot write a full line to {path}")
    finally:
        os.close(descriptor)


def _check(name: str, kind: str, value: Any) -> None:
    if not _CHECKS[kind](value):
        raise ValueError(f"{name} is not a {kind}")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _is_seconds(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value < 1e12  # type: ignore[arg-type, operator]


def _are_phases(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    return all(name in _PHASES and _is_seconds(value[name]) for name in value)


_CHECKS: dict[str, Callable[[object], bool]] = {
    "str": _is_text,
    "bool": _is_flag,
    "int": _is_count,
    "float": _is_seconds,
    "dict[str, float]": _are_phases,
}
"""Check of a field's value, by the field's type as it is written in the class."""
