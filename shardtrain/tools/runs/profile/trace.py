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
    summary = Summary(path)
    all_events = _events(path)
    # Complete events have a start and a duration. The trace is untrusted, so both may be anything.
    events = []
    for event in all_events:
        has_span = _is_number(event.get("ts")) and _is_number(event.get("dur"))
        if event.get("ph") == "X" and has_span and "name" in event:
            events.append(event)
    summary.steps = _step_durations(events)

    # Use device kernels if there are any, otherwise CPU operators.
    work = [event for event in events if event.get("cat") in _DEVICE]
    summary.on_device = bool(work)
    if not work:
        work = [event for event in events if event.get("cat") == "cpu_op"]

    operations: dict[str, Operation] = {}
    compute: list[Span] = []
    communication: list[Span] = []
    for events_of_thread in _by_thread(work):
        for event, own_spans in _own_spans(events_of_thread):
            name = str(event["name"])
            operation = operations.setdefault(name, Operation(name))
            operation.calls += 1
            operation.total_us += float(event["dur"])
            operation.self_us += _length(own_spans)
            if _COMMUNICATION.search(name):
                communication.append(_span(event))
            else:
                compute += own_spans
    # On a CPU, gloo's threads record a collective from its start to its end.
    if not summary.on_device:
        for event in events:
            if str(event.get("name")).startswith(("gloo:", "mpi:")):
                communication.append(_span(event))

    # Operations of different threads and streams overlap. Merge their spans before adding them up.
    busy = _union(compute)
    communicating = _union(communication)
    hidden = _overlap(communicating, busy)
    summary.operations = sorted(operations.values(), key=lambda operation: -operation.self_us)
    summary.compute_us = _length(busy)
    summary.communication_us = _length(communicating)
    summary.exposed_us = summary.communication_us - _length(hidden)
    summary.memory = _memory(all_events, summary.on_device)
    return summary


def _by_thread(events: Iterable[dict[str, Any]]) -> Iterable[list[dict[str, Any]]]:
    """Return the events of each thread or stream, within which they nest."""
    threads: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        # A damaged file may have lists as names of threads, so convert them to text.
        thread = (str(event.get("pid")), str(event.get("tid")))
        threads[thread].append(event)
    return threads.values()


def _step_durations(events: Sequence[dict[str, Any]]) -> list[float]:
    """Return the microseconds of each step that the profiler marked.

    Without marks, the full trace is one step.
    """
    steps = []
    for event in events:
        if event.get("cat") == "user_annotation" and _STEP.match(str(event.get("name"))):
            steps.append(_span(event))
    if not steps and events:
        spans = [_span(event) for event in events]
        first = min(begin for begin, _ in spans)
        last = max(end for _, end in spans)
        steps = [(first, last)]
    return [end - begin for begin, end in sorted(steps)]


def _is_number(value: object) -> TypeGuard[float]:
    """True for plausible microseconds or bytes. False for NaN and for integers too large for ``float``."""
    return type(value) in (int, float) and -_LARGEST < value < _LARGEST  # type: ignore[operator]


def _events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace with the required fields. Parse one event at a time to bound memory."""
    events = []
    try:
        with _open(path) as file:
            text = io.TextIOWrapper(io.BufferedReader(_Bounded(file, path)))
            for number, event in enumerate(_parsed(text, path)):
                if number == MOST_EVENTS:
                    raise DataError(
                        f"the trace {path} has more than {MOST_EVENTS} events; open it in ui.perfetto.dev",
                    )
                if not isinstance(event, dict):
                    continue
                fields = {key: event[key] for key in _KEYS if key in event}
                # Only events of memory need their arguments, which take most of the space.
                if event.get("name") != "[memory]":
                    fields.pop("args", None)
                events.append(fields)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read the trace {path}: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not a trace: {str(error)[:100]}; name one that the profiler wrote",
        ) from error
    return events


def _open(path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.open(path)
    return open(path, "rb", opener=atomic_io.without_waiting)


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
            raise DataError(
                f"the trace {self._path} is larger than {MOST_BYTES >> 20} MiB; open it in ui.perfetto.dev",
            )
        buffer[: len(data)] = data
        return len(data)


def _parsed(file: TextIO, path: Path) -> Iterator[Any]:
    """Yield the events of the list ``traceEvents``, or of a top-level list."""
    # Find the start of the list. It may be split between two parts.
    text = file.read(_PART)
    begin = _BEGIN.search(text)
    while begin is None and (more := file.read(_PART)):
        text = text[-100:] + more
        begin = _BEGIN.search(text)
    if begin is None:
        raise DataError(f"{path} has no traceEvents; name a trace that the profiler wrote")

    decoder = json.JSONDecoder()
    at = begin.end()
    while True:
        # Keep at least one part in memory: an event is shorter than a part, so the next one is complete.
        if len(text) - at < _PART:
            text = text[at:] + file.read(_PART)
            at = 0
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
        if text[at : at + 1] == "]":
            return
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            reason = str(error)[:100]
            raise DataError(
                f"{path} is not a trace: {reason}; name one that the profiler wrote"
            ) from error
        yield value


def _memory(events: Iterable[dict[str, Any]], on_device: bool) -> list[tuple[float, float]]:
    """Return the recorded allocated bytes over time, of the device if there is one, otherwise of the CPU."""
    records = []
    for event in events:
        arguments = event.get("args")
        if event.get("name") != "[memory]" or not isinstance(arguments, dict):
            continue
        size = arguments.get("Total Allocated")
        time = event.get("ts")
        # PyTorch's device type 0 is the CPU.
        is_of_device = arguments.get("Device Type") != 0
        if _is_number(size) and _is_number(time) and is_of_device == on_device:
            records.append((float(time), float(size)))
    records.sort()
    curve = []
    for time, size in records:
        first_time, _ = records[0]
        curve.append((time - first_time, size))
    return curve


def _own_spans(events: Sequence[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], list[Span]]]:
    """Yield each event of a thread with the spans in which no nested event was running."""
    # Sort by start. Of two events that start together, the longer one contains the other, so it comes first.
    in_order = sorted(events, key=lambda event: (event["ts"], -event["dur"]))
    spans = [_span(event) for event in in_order]
    children: list[list[Span]] = [[] for _ in spans]
    # ``running`` is a stack of the events that contain the current one, the innermost last.
    running: list[int] = []
    for index, (begin, end) in enumerate(spans):
        while running and spans[running[-1]][1] <= begin:
            running.pop()
        if running:
            parent = running[-1]
            _, end_of_parent = spans[parent]
            children[parent].append((begin, min(end, end_of_parent)))
        running.append(index)

    # Yield the gaps of each event between its nested events.
    for event, (at, end), nested in zip(in_order, spans, children, strict=True):
        gaps = []
        for first, last in _union(nested):
            if first > at:
                gaps.append((at, first))
            at = max(at, last)
        if end > at:
            gaps.append((at, end))
        yield event, gaps


def _span(event: dict[str, Any]) -> Span:
    begin = float(event["ts"])
    return begin, begin + float(event["dur"])


def _union(spans: Iterable[Span]) -> list[Span]:
    """Merge overlapping and touching spans. Return disjoint spans in ascending order."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            last_begin, last_end = merged[-1]
            merged[-1] = (last_begin, max(last_end, end))
        else:
            merged.append((begin, end))
    return merged


def _overlap(one: Sequence[Span], other: Sequence[Span]) -> list[Span]:
    """Return the intersection of two unions."""
    common = []
    i = 0
    j = 0
    while i < len(one) and j < len(other):
        one_begin, one_end = one[i]
        other_begin, other_end = other[j]
        begin = max(one_begin, other_begin)
        end = min(one_end, other_end)
        if begin < end:
            common.append((begin, end))
        # Continue with the next span of the side whose span ends first.
        if one_end < other_end:
            i += 1
        else:
            j += 1
    return common


def _length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)
