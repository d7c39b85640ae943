"""Summarize a trace of PyTorch's profiler: time per operation, and exposed communication.

The file has Chrome's trace event format: complete events (``"ph": "X"``) with a start ``ts`` and a duration
``dur`` in microseconds, on a thread ``tid`` of a process ``pid``. Events of one thread nest.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeGuard

from shardtrain.utils import atomic_io
from shardtrain.utils.errors import DataError

MOST_BYTES = 1 << 29
"""Maximum size of an uncompressed trace. One step of a large model takes about 100 MB."""
MOST_EVENTS = 1_200_000
"""Maximum number of events.

A step of a large model has about 300,000. Each event takes about 750 bytes of memory.
"""
_LARGEST = 10**18
_PART = 1 << 20
_BEGIN = re.compile(r'\A\s*\[|"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")
_KEYS = ("name", "ph", "cat", "ts", "dur", "pid", "tid", "args")
_COMMUNICATION = re.compile(
    r"^(nccl|rccl|gloo:|xccl|hccl|mpi:|c10d::|_c10d_functional::)|nccl(Dev)?Kernel|record_param_comms|"
    r"FSDP::all_gather|FSDP::.*reduce_scatter"
)
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_STEP = re.compile(r"^ProfilerStep#\d+$")
Span = tuple[float, float]
"""Begin and end in microseconds."""


@dataclass
class Operation:
    """Calls and time of all operations with one name. ``self_us`` excludes nested operations."""

    name: str
    calls: int = 0
    self_us: float = 0.0
    total_us: float = 0.0


@dataclass
class Summary:
    """Summary of one rank's trace. Times are in microseconds, summed over all recorded steps."""

    path: Path
    steps: list[float] = field(default_factory=list)
    """Duration of each recorded step."""
    on_device: bool = False
    """True if times are those of device kernels, False if they are those of CPU operators."""
    operations: list[Operation] = field(default_factory=list)
    """Operations, longest first."""
    compute_us: float = 0.0
    communication_us: float = 0.0
    exposed_us: float = 0.0
    """Communication time during which nothing was computed."""
    memory: list[tuple[float, float]] = field(default_factory=list)
    """Pairs of microseconds since the first record and bytes allocated by PyTorch at that time."""

    @property
    def span_us(self) -> float:
        """Total duration of all recorded steps."""
        return sum(self.steps)


def read(path: Path) -> Summary:
    """Summarize one trace.

    Raises:
        DataError: the file is not a trace, or exceeds a limit of this module.
    """
    everything = _events(path)
    events = [
        one
        for one in everything
        if one.get("ph") == "X" and _is_number(one.get("ts")) and _is_number(one.get("dur")) and "name" in one
    ]

    # Find the steps marked by the profiler. Without marks, the full trace is one step.
    found = Summary(path)
    steps = [_span(one) for one in events if one.get("cat") == "user_annotation" and _STEP.match(str(one.get("name")))]
    found.steps = [end - begin for begin, end in sorted(steps)]
    if not found.steps and events:
        spans = [_span(one) for one in events]
        found.steps = [max(end for _, end in spans) - min(begin for begin, _ in spans)]

    # Use device kernels if there are any, otherwise CPU operators, by stream or thread.
    device = [one for one in events if one.get("cat") in _DEVICE]
    found.on_device = bool(device)
    work = device or [one for one in events if one.get("cat") == "cpu_op"]
    named: dict[str, Operation] = {}
    compute: list[Span] = []
    communication: list[Span] = []
    threads: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for one in work:
        threads[str(one.get("pid")), str(one.get("tid"))].append(one)  # as text: a file may contain lists here
    for own in threads.values():
        for one, alone in _alone(own):
            name = str(one["name"])
            operation = named.setdefault(name, Operation(name))
            operation.calls += 1
            operation.total_us += float(one["dur"])
            operation.self_us += sum(end - begin for begin, end in alone)
            if _COMMUNICATION.search(name):
                communication.append(_span(one))
            else:
                compute += alone
    # On a CPU, gloo's threads record a collective from its start to its end.
    if not device:
        communication += [_span(one) for one in events if str(one.get("name")).startswith(("gloo:", "mpi:"))]

    busy = _union(compute)
    talking = _union(communication)
    found.operations = sorted(named.values(), key=lambda one: -one.self_us)
    found.compute_us = _length(busy)
    found.communication_us = _length(talking)
    found.exposed_us = found.communication_us - _length(_overlap(talking, busy))
    found.memory = _memory(everything, device=bool(device))
    return found


def _is_number(value: object) -> TypeGuard[float]:
    """True for plausible microseconds or bytes. False for NaN and for integers too large for ``float``."""
    return type(value) in (int, float) and -_LARGEST < value < _LARGEST  # type: ignore[operator]


def _events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace with the required fields. Parse one event at a time to bound memory."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb", opener=atomic_io.without_waiting) as file:
            found = []
            text = io.TextIOWrapper(io.BufferedReader(_Bounded(file, path)))
            for number, event in enumerate(_parsed(text, path)):
                if number == MOST_EVENTS:
                    raise DataError(f"the trace {path} has more than {MOST_EVENTS} events; open it in ui.perfetto.dev")
                if isinstance(event, dict):
                    found.append({key: event[key] for key in _KEYS if key in event})
                    if event.get("name") != "[memory]":
                        found[-1].pop("args", None)
            return found
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read the trace {path}: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a trace: {str(error)[:100]}; name one that the profiler wrote") from error


class _Bounded(io.RawIOBase):
    """File wrapper that limits the number of bytes."""

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__()
        self._file = file
        self._path = path
        self._left = MOST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise DataError(f"the trace {self._path} is larger than {MOST_BYTES >> 20} MiB; open it in ui.perfetto.dev")
        buffer[: len(data)] = data
        return len(data)


def _parsed(file: TextIO, path: Path) -> Iterator[Any]:
    """Yield the events of the list ``traceEvents``, or of a top-level list."""
    decoder = json.JSONDecoder()
    text = file.read(_PART)
    at = 0
    begin = _BEGIN.search(text)
    while begin is None and (more := file.read(_PART)):
        text = text[-100:] + more
        begin = _BEGIN.search(text)
    if begin is None:
        raise DataError(f"{path} has no traceEvents; name a trace that the profiler wrote")
    at = begin.end()
    while True:
        if len(text) - at < _PART:  # an event is shorter
            text = text[at:] + file.read(_PART)
            at = 0
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
        if text[at : at + 1] == "]":
            return
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            why = str(error)[:100]
            raise DataError(f"{path} is not a trace: {why}; name one that the profiler wrote") from error
        yield value


def _memory(events: Iterable[dict[str, Any]], device: bool) -> list[tuple[float, float]]:
    """Return the recorded allocated bytes over time, of the device if there is one, otherwise of the CPU."""
    found = []
    for one in events:
        facts = one.get("args")
        if one.get("name") != "[memory]" or not isinstance(facts, dict):
            continue
        total = facts.get("Total Allocated")
        kind = facts.get("Device Type")
        when = one.get("ts")
        if _is_number(total) and _is_number(when) and (kind != 0) == device:
            found.append((float(when), float(total)))
    found.sort()
    return [(when - found[0][0], size) for when, size in found]


def _span(event: dict[str, Any]) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _alone(events: Sequence[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], list[Span]]]:
    """Yield each event of a thread with the spans in which no nested event was running."""
    children: dict[int, list[Span]] = defaultdict(list)

    # Sort by start. Of two events that start together, the longer one contains the other, so it comes first.
    order = sorted(range(len(events)), key=lambda index: (events[index]["ts"], -events[index]["dur"]))
    above: list[int] = []
    for index in order:
        begin, end = _span(events[index])
        while above and _span(events[above[-1]])[1] <= begin:
            above.pop()
        if above:
            children[above[-1]].append((begin, min(end, _span(events[above[-1]])[1])))
        above.append(index)

    # Yield the gaps of each event between its nested events.
    for index in order:
        begin, end = _span(events[index])
        alone = []
        at = begin
        for first, last in _union(children[index]):
            if first > at:
                alone.append((at, first))
            at = max(at, last)
        if end > at:
            alone.append((at, end))
        yield events[index], alone


def _union(spans: Iterable[Span]) -> list[Span]:
    """Merge overlapping and touching spans. Return disjoint spans in ascending order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _overlap(one: Sequence[Span], other: Sequence[Span]) -> list[Span]:
    """Return the intersection of two unions."""
    found = []
    i = 0
    j = 0
    while i < len(one) and j < len(other):
        begin = max(one[i][0], other[j][0])
        end = min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)
