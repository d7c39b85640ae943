"""Read a run folder: metrics, validation, samples, goodput, options, alerts and exit status.

``report``, ``watch``, ``runs``, ``replay`` and the model card all read through this module. The folder is
untrusted input: invalid lines are counted and skipped, texts are truncated, and memory is bounded by
logged steps times metrics, whatever the size of a line.
"""

from __future__ import annotations

import errno
import math
import os
import re
import time
import tomllib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardtrain import config as configs
from shardtrain.config import Loaded
from shardtrain.config.toml_writer import RESOLVED_CONFIG
from shardtrain.launch import failure
from shardtrain.launch.goodput import events
from shardtrain.launch.goodput.account import Account, account, attempts_of
from shardtrain.utils import atomic_io, bounded_reads, checked_json
from shardtrain.utils.checked_json import is_count, record_of
from shardtrain.utils.errors import COMMAND_LINE, ConfigError, DataError, Problem

POINTS = 600
"""Intervals of a chart. Each interval keeps its minimum and maximum, so spikes stay visible."""
_LINE_BYTES = 1 << 16
_MOST_METRICS = 200
_CONFIG_BYTES = 1 << 20
_LOG_BYTES = 1 << 20
_MOST_ALERTS = 30
_MOST_SAMPLES = 8
_TEXT_CHARACTERS = 1000
_ALERT_CHARACTERS = 500
_DEEPEST = 5
_FRESH_SECONDS = 600.0
"""A run that has written nothing for longer is "silent" instead of "under way"."""
_STATES = {0: "ended", failure.PREEMPTED: "stopped (75)", failure.NOT_SAVED: "stopped (76)"}
"""States of a run by exit code. All other codes are failures."""


@dataclass
class Series:
    """Steps and values of one metric, in file order."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def thinned(self, points: int = POINTS) -> tuple[list[int], list[float]]:
        """Downsample to at most ``2 * points`` values: the minimum and maximum of each interval, in order."""
        count = len(self.steps)
        if count <= 2 * points:
            return list(self.steps), list(self.values)
        steps = []
        values = []
        for interval in range(points):
            begin = interval * count // points
            end = (interval + 1) * count // points
            places = range(begin, end)
            lowest = min(places, key=self.values.__getitem__)
            highest = max(places, key=self.values.__getitem__)
            # Both are the same place if all values of the interval are equal.
            for place in sorted({lowest, highest}):
                steps.append(self.steps[place])
                values.append(self.values[place])
        return steps, values


@dataclass(frozen=True)
class RunStatus:
    """State of one run: folder, last record, ``exit.json`` of the newest attempt, seconds since the last write."""

    folder: Path
    last: dict[str, Any]
    end: dict[str, Any]
    age_seconds: float

    @property
    def state(self) -> str:
        """Return the state in one or two words, such as "under way" or "failed (3)".

        Every command that prints a state uses this property.
        """
        if self.end:
            # The file may contain anything, such as a long text.
            code = self.end.get("code")
            if type(code) is not int:
                return "failed"
            return _STATES.get(code, f"failed ({code})")
        if self.age_seconds < _FRESH_SECONDS:
            return "under way"
        return "silent"


class RunFolder:
    """Paths and contents of a run's files. A missing or invalid file reads as empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.validation = path / "validation.jsonl"
        self.samples = path / "samples.jsonl"
        self.planned = path / "planned.json"
        self.goodput = path / events.FILE
        self.log = path / "logs" / "rank-0.log"
        self.config = path / RESOLVED_CONFIG
        self.exit = path / "exit.json"

    def status(self) -> RunStatus:
        """Return the state of the run. Only reads the ends of its files."""
        metrics_time = _modified(self.metrics)
        exit_time = _modified(self.exit)
        last_write = max(metrics_time, exit_time, _modified(self.goodput), _modified(self.log))
        age_seconds = max(0.0, time.time() - last_write)

        # An exit.json that is older than the last record belongs to an earlier attempt.
        end: dict[str, Any] = {}
        if exit_time >= metrics_time:
            end = read_object(self.exit)

        # The last line may be incomplete, because the run may be writing it.
        last: dict[str, Any] = {}
        for line in reversed(read_end(self.metrics, _LINE_BYTES).split(b"\n")):
            record = step_record(line)
            if record is not None:
                last = record
                break
        return RunStatus(self.path, last, end, age_seconds)

    def options(self) -> dict[str, Any]:
        """Return the options of the resolved configuration by dotted name."""
        options: dict[str, Any] = {}

        def add(prefix: str, table: dict[str, Any]) -> None:
            for name, value in table.items():
                if isinstance(value, dict):
                    add(f"{prefix}{name}.", value)
                else:
                    options[f"{prefix}{name}"] = value

        try:
            text = bounded_reads.start(self.config, _CONFIG_BYTES).decode()
            add("", tomllib.loads(text))
        except (OSError, ValueError, RecursionError):
            return {}
        return options

    def load(self, overrides: Sequence[str]) -> Loaded:
        """Load the resolved configuration.

        Raise ConfigError if it is missing, invalid, or names code of the user.
        """
        if not bounded_reads.is_present(self.config):
            raise ConfigError(
                Problem(
                    "RUN_FOLDER",
                    str(self.path),
                    rule=f"is not a run's folder: it has no {RESOLVED_CONFIG}",
                    fix="name the job.dump_folder of a run",
                    where=COMMAND_LINE,
                )
            )
        loaded = configs.load(self.config, overrides)
        # A run's folder is untrusted, so never import code that its configuration names.
        problem = configs.code_of_a_run(loaded)
        if problem:
            raise ConfigError(problem)
        return loaded

    def world_size(self) -> int | None:
        """Return the number of ranks from the header of the resolved configuration, or None if it is missing."""
        match = re.search(r", (\d{1,9}) ranks, started from ", self._config_header())
        return int(match[1]) if match else None

    def versions(self) -> str:
        """Return the versions of shardtrain, torch and Python that wrote the resolved configuration."""
        match = re.search(
            r"^# (shardtrain .*?, torch .*?, Python [\d.]+)",
            self._config_header(),
            re.MULTILINE,
        )
        return match[1] if match else ""

    def certificate(self) -> str:
        """Return the state of the certificate at the start of the run, or "" without one."""
        match = re.search(r"^# certificate: (.{1,1000})", self._config_header(), re.MULTILINE)
        return match[1] if match else ""

    def _config_header(self) -> str:
        """Return the first three lines of the configuration.

        In files of old versions the first line is not a JSON schema.
        """
        lines = read_start(self.config, 2 * 4096).decode(errors="replace").split("\n")
        return "\n".join(lines[:3])

    def account(self) -> Account | None:
        """Return the division of wall time over all attempts, or None without a goodput file.

        Raises DataError.
        """
        if not bounded_reads.is_present(self.goodput):
            return None
        events_of_run, _ = events.read(self.path)
        return account(attempts_of(events_of_run))


def below(root: Path) -> Iterator[RunStatus]:
    """Yield the runs in and below a folder, at most five levels deep.

    Links and run folders are not searched.
    """
    for folder, names, files in os.walk(root):
        depth = len(Path(folder).relative_to(root).parts)
        # ``os.walk`` searches the folders that remain in ``names``.
        if "metrics.jsonl" in files:
            names.clear()
            yield RunFolder(Path(folder)).status()
        elif depth >= _DEEPEST:
            names.clear()
        else:
            visible_names = [name for name in names if not name.startswith(".")]
            names[:] = sorted(visible_names)


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
    certificate: str = ""
    """State of the certificate at the start of the run."""


def read(path: Path) -> RunRecord:
    """Read a run's folder.

    Raises:
        ConfigError: the folder has no ``metrics.jsonl``.
    """
    folder = RunFolder(path)
    record = RunRecord(Path(os.path.realpath(path)).name, path)
    if not bounded_reads.is_present(folder.metrics):
        raise ConfigError(
            Problem(
                "RUN_FOLDER",
                str(path),
                rule="has no metrics.jsonl",
                fix="name the folder of a run, which is its job.dump_folder",
                where=COMMAND_LINE,
            )
        )
    # Without this file there is nothing to show. Of the others, a bad one counts as a damaged line.
    try:
        bounded_reads.start(folder.metrics, 1)
    except OSError as error:
        raise bounded_reads.unreadable(
            "RUN_FOLDER", folder.metrics, error, "remove it, or name another run"
        ) from error
    record.bad_lines += _read_series(folder.metrics, record.metrics)
    record.bad_lines += _read_series(folder.validation, record.validation)
    record.samples, num_bad_samples = _samples(folder.samples)
    record.bad_lines += num_bad_samples
    for name, pair in read_object(folder.planned).items():
        if isinstance(pair, list) and len(pair) == 2 and all(map(_is_number, pair)):
            planned, measured = pair
            record.planned[name[:100]] = (float(planned), float(measured))
    for series in record.metrics.values():
        record.last_step = max(record.last_step, series.steps[-1])
    record.options = folder.options()
    record.certificate = folder.certificate()
    record.alerts = alerts(read_end(folder.log, _LOG_BYTES))[-_MOST_ALERTS:]
    record.end = read_object(folder.exit)
    # A damaged goodput file must not hide the rest of the run. The page shows it as a damaged line.
    try:
        record.account = folder.account()
    except DataError:
        record.bad_lines += 1
    return record


_NUMBERS = frozenset({int, float})


def _is_number(value: object) -> bool:
    """True for numbers of JSON. A bool is an int for ``isinstance``."""
    return type(value) in _NUMBERS


def _read_series(path: Path, series_of: dict[str, Series]) -> int:
    """Add the numbers of a JSONL file to the series of their names. Return the number of invalid lines."""
    bad_lines = 0
    for record in records(path):
        if record is None:
            bad_lines += 1
            continue
        step = record.pop("step")
        for name, value in record.items():
            # A record has null for NaN and infinity, and text for hashes. A bool is not a number.
            if type(value) not in _NUMBERS or not math.isfinite(value):
                continue
            series = series_of.get(name)
            if series is None:
                # Bound the number of series, because the file is untrusted.
                if len(series_of) >= _MOST_METRICS or len(name) > 100:
                    continue
                series = series_of[name] = Series()
            series.steps.append(step)
            series.values.append(value)
    return bad_lines


def _samples(path: Path) -> tuple[list[tuple[int, str, str]], int]:
    """Return at most ``_MOST_SAMPLES`` samples, spread over the run, including the first and the last.

    Also return the number of invalid lines.
    """
    samples = []
    bad_lines = 0
    for record in records(path):
        if record is None:
            bad_lines += 1
            continue
        prompt = record.get("prompt")
        text = record.get("text")
        if isinstance(prompt, str) and isinstance(text, str):
            samples.append((record["step"], prompt[:_TEXT_CHARACTERS], text[:_TEXT_CHARACTERS]))
            # Halve the list repeatedly, so a long file needs no more memory than a short one.
            if len(samples) > 2 * _MOST_SAMPLES:
                del samples[1:-1:2]
    if len(samples) <= _MOST_SAMPLES:
        return samples, bad_lines
    distance = (len(samples) - 1) / (_MOST_SAMPLES - 1)
    places = [round(number * distance) for number in range(_MOST_SAMPLES)]
    return [samples[place] for place in places], bad_lines


def records(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the record of each complete line, or None if the line is invalid or too long.

    Yield nothing without a file.
    """
    if not bounded_reads.is_present(path):
        return
    try:
        opened = open(path, "rb", opener=atomic_io.without_waiting)  # noqa: SIM115
    except OSError:
        yield None
        return
    with opened as file:
        while True:
            try:
                line = bounded_reads.line(file, _LINE_BYTES)
            except OSError as error:
                if error.errno != errno.EFBIG:
                    raise
                # Nothing after such a line was written by a run.
                yield None
                return
            if len(line) > _LINE_BYTES:
                yield None
                continue
            # The last line of the file may be incomplete.
            if not line.endswith(b"\n"):
                return
            if line.strip():
                yield step_record(line)


def step_record(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line if its checksum is right and it has a step, else None."""
    record = record_of(line)
    if record is None or not is_count(record.get("step")):
        return None
    return record


def alerts(log: bytes) -> list[str]:
    """Return the distinct warnings and errors in a part of a rank's log, in order."""
    distinct: dict[str, None] = {}
    for line in log.decode(errors="replace").splitlines():
        # The level is near the start of a line. A message may contain the same word.
        start = line[:40]
        if " WARNING " in start or " ERROR " in start:
            distinct[line[:_ALERT_CHARACTERS]] = None
    return list(distinct)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a small file; empty if it is missing or invalid."""
    try:
        content = checked_json.parse(read_start(path, _LINE_BYTES))
    except ValueError:
        return {}
    if not isinstance(content, dict):
        return {}
    return content


def read_start(path: Path, most_bytes: int) -> bytes:
    """Return the first bytes of a file; empty if it cannot be read."""
    try:
        return bounded_reads.start(path, most_bytes)
    except OSError:
        return b""


def read_end(path: Path, most_bytes: int) -> bytes:
    """Return the last bytes of a file; empty if it cannot be read."""
    try:
        return bounded_reads.end(path, most_bytes)
    except OSError:
        return b""


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
