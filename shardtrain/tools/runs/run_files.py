"""Read a run folder for a report: metrics, validation, samples, goodput, options and exit status.

The folder is untrusted input. Invalid lines are counted and skipped, texts are truncated, and memory
is bounded by logged steps times metrics, whatever the size of a line.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardtrain.launch.goodput import events
from shardtrain.launch.goodput.account import Account, account, attempts_of
from shardtrain.utils import atomic_io, reading
from shardtrain.utils.checked_json import record_of
from shardtrain.utils.errors import ConfigError, DataError, Problem

POINTS = 600
"""Intervals of a chart. Each keeps its minimum and maximum, so spikes stay visible."""
_LINE_BYTES = 1 << 16
_MOST_METRICS = 200
_CONFIG_BYTES = 1 << 20
_LOG_BYTES = 1 << 20
_MOST_ALERTS = 30
_MOST_SAMPLES = 8
_TEXT_CHARACTERS = 1000


@dataclass
class Series:
    """The values of one metric by step, in the order of the file."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def thinned(self, points: int = POINTS) -> tuple[list[int], list[float]]:
        """Downsample to at most ``2 * points`` values: the minimum and maximum of each interval, in order."""
        count = len(self.steps)
        if count <= 2 * points:
            return list(self.steps), list(self.values)
        kept: list[int] = []
        for stretch in range(points):
            places = range(stretch * count // points, (stretch + 1) * count // points)
            low = min(places, key=self.values.__getitem__)
            high = max(places, key=self.values.__getitem__)
            kept += sorted({low, high})
        return [self.steps[place] for place in kept], [self.values[place] for place in kept]


@dataclass
class RunRecord:
    """Data of one run folder."""

    name: str
    folder: Path
    metrics: dict[str, Series] = field(default_factory=dict)
    validation: dict[str, Series] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    """Every option of the resolved configuration, by dotted name."""
    samples: list[tuple[int, str, str]] = field(default_factory=list)
    """(step, prompt, continuation)"""
    planned: dict[str, tuple[float, float]] = field(default_factory=dict)
    """(planned, measured) values by name."""
    alerts: list[str] = field(default_factory=list)
    account: Account | None = None
    end: dict[str, Any] = field(default_factory=dict)
    """Contents of ``exit.json``; empty while the run is in progress, or if it was killed."""
    bad_lines: int = 0
    last_step: int = 0


def read(folder: Path) -> RunRecord:
    """Read a run's folder.

    Raises:
        ConfigError: the folder has no ``metrics.jsonl``.
    """
    record = RunRecord(Path(os.path.realpath(folder)).name, folder)
    path = folder / "metrics.jsonl"
    if not path.is_file():
        fix = "name the folder of a run, which is its job.dump_folder"
        raise ConfigError(Problem("RUN_FOLDER", str(folder), "has no metrics.jsonl", fix, "command line"))
    record.bad_lines = _read_series(path, record.metrics)
    if (folder / "validation.jsonl").is_file():
        record.bad_lines += _read_series(folder / "validation.jsonl", record.validation)
    record.samples = _samples(folder / "samples.jsonl")
    for name, pair in _object(folder / "planned.json").items():
        if isinstance(pair, list) and len(pair) == 2 and all(type(value) in (int, float) for value in pair):
            record.planned[name[:100]] = (float(pair[0]), float(pair[1]))
    record.last_step = max((series.steps[-1] for series in record.metrics.values()), default=0)
    record.options = read_options(folder / "config.resolved.toml")
    record.alerts = _alerts(folder / "logs" / "rank-0.log")
    record.end = _object(folder / "exit.json")
    if (folder / events.FILE).is_file():
        try:
            record.account = account(attempts_of(events.read(folder)[0]))
        except DataError:
            record.bad_lines += 1
    return record


def _read_series(path: Path, found: dict[str, Series]) -> int:
    """Add the numbers of a JSONL file to ``found``; return the number of invalid lines."""
    bad = 0
    for line in _lines(path):
        record = record_of(line) if line is not None else None
        step = record.get("step") if record is not None else None
        if record is None or type(step) is not int or not 0 <= step < 2**63:
            bad += 1
            continue
        for name, value in record.items():
            if name == "step" or type(value) not in (int, float) or not math.isfinite(value):
                continue
            if name not in found and (len(found) >= _MOST_METRICS or len(name) > 100):
                continue
            series = found.setdefault(name, Series())
            series.steps.append(step)
            series.values.append(float(value))
    return bad


def _samples(path: Path) -> list[tuple[int, str, str]]:
    """Return at most ``_MOST_SAMPLES`` samples, spread over the run, including the first and the last."""
    found = []
    for line in _lines(path) if path.is_file() else ():
        try:
            record = json.loads(line) if line is not None else None
        except (ValueError, RecursionError):
            continue
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            continue
        prompt = record.get("prompt")
        text = record.get("text")
        if isinstance(prompt, str) and isinstance(text, str):
            found.append((record["step"], prompt[:_TEXT_CHARACTERS], text[:_TEXT_CHARACTERS]))
            # every second one goes, again and again, so that a long file takes no more memory than a short one
            if len(found) > 2 * _MOST_SAMPLES:
                del found[1:-1:2]
    if len(found) > _MOST_SAMPLES:
        last = len(found) - 1
        found = [found[round(place * last / (_MOST_SAMPLES - 1))] for place in range(_MOST_SAMPLES)]
    return found


def _lines(path: Path) -> Iterator[bytes | None]:
    """Yield complete lines, or None for a line that is too long. An incomplete last line is skipped."""
    with open(path, "rb", opener=atomic_io.without_waiting) as file:
        while line := file.readline(_LINE_BYTES):
            if line.endswith(b"\n"):
                if line.strip():
                    yield line
                continue
            if len(line) < _LINE_BYTES:  # an incomplete line at the end of the file
                return
            while line and not line.endswith(b"\n"):
                line = file.readline(_LINE_BYTES)
            yield None


def read_options(path: Path) -> dict[str, Any]:
    """Return the options of a ``config.resolved.toml`` by dotted name; empty if it is missing or invalid."""
    found: dict[str, Any] = {}

    def add(prefix: str, table: dict[str, Any]) -> None:
        for name, value in table.items():
            if isinstance(value, dict):
                add(f"{prefix}{name}.", value)
            else:
                found[f"{prefix}{name}"] = value

    try:
        add("", tomllib.loads(reading.start(path, _CONFIG_BYTES).decode()))
    except (OSError, ValueError, RecursionError):
        return {}
    return found


def _alerts(path: Path) -> list[str]:
    """Return the last distinct warnings and errors of rank 0's log."""
    try:
        text = reading.end(path, _LOG_BYTES).decode(errors="replace")
    except OSError:
        return []
    lines = [line[:500] for line in text.splitlines() if " WARNING " in line[:40] or " ERROR " in line[:40]]
    return list(dict.fromkeys(lines))[-_MOST_ALERTS:]


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(reading.start(path, _LINE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
