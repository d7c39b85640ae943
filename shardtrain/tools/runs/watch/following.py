"""Follow the files of a run as they grow. Each update reads only the data that was appended since the last one.

A file that became shorter or was replaced belongs to a resumed or restarted run, so it is read from its
start. A long file is sampled: a few hundred records spread over it are enough for a curve as wide as a
terminal.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardtrain.launch.goodput.account import Account
from shardtrain.tools.runs import run_files
from shardtrain.tools.runs.run_files import RunFolder
from shardtrain.utils import atomic_io
from shardtrain.utils.errors import DataError

CURVES = ("loss", "grad_norm", "tokens_per_second", "memory_gib")
POINTS = 2048
"""Maximum number of points of a curve. A longer curve is thinned to half as many points."""
_WHOLE_BYTES = 4 << 20
"""Size in bytes above which a file is sampled when it is opened. Only its end is then read completely."""
_SAMPLES = 512
_SAMPLE_BYTES = 8192
_LOG_BYTES = 1 << 18
_MOST_ALERTS = 5


@dataclass
class Tail:
    """A file to which another process appends. ``read`` returns the new lines."""

    path: Path
    skipped: bool = False
    """True if the last call skipped data because there were more new bytes than its limit."""
    _inode: int = -1
    _place: int = 0

    def read(self, most_bytes: int) -> tuple[bytes, bool]:
        """Return the new complete lines, and True if the file was replaced or truncated.

        Read at most ``most_bytes``, from the end of the file.
        """
        try:
            with open(self.path, "rb", opener=atomic_io.without_waiting) as file:
                status = os.fstat(file.fileno())
                from_start = status.st_ino != self._inode or status.st_size < self._place
                if from_start:
                    self._inode = status.st_ino
                    self._place = 0
                begin = max(self._place, status.st_size - most_bytes)
                file.seek(begin)
                data = file.read(most_bytes)
        except OSError:
            from_start = self._inode != -1
            self._inode = -1
            self._place = 0
            return b"", from_start

        # Keep an incomplete last line for the next call. A skipped part ends within a line, so skip the
        # rest of it.
        self.skipped = begin > self._place
        first = 0
        if self.skipped:
            first = data.find(b"\n") + 1
        end = data.rfind(b"\n") + 1
        self._place = begin + end
        return data[first:end], from_start


@dataclass
class FollowedRun:
    """Contents of one run's files at the last update."""

    folder: Path
    curves: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict)
    """Steps and values by metric, in ascending order of steps."""
    last: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, Any] = field(default_factory=dict)
    account: Account = field(default_factory=lambda: Account.from_record({}))
    """Division of the wall time: of the full run if it has ended, otherwise until the last logged step."""
    alerts: list[str] = field(default_factory=list)
    total_steps: int = 0
    state: str = "not there yet"
    age_seconds: float = math.inf

    def __post_init__(self) -> None:
        self._files = RunFolder(self.folder)
        self._metrics = Tail(self._files.metrics)
        self._validation = Tail(self._files.validation)
        self._log = Tail(self._files.log)

    def look(self) -> None:
        """Read the new data of all files."""
        status = self._files.status()
        self.age_seconds = status.age_seconds
        self.state = "not there yet"
        if status.end or self._files.metrics.exists():
            self.state = status.state

        self._read_metrics()
        is_over = status.state not in ("under way", "silent")
        self.account = self._account(is_over)

        data, _ = self._validation.read(_LOG_BYTES)
        lines = data.splitlines()
        if lines:
            record = run_files.step_record(lines[-1])
            self.validation = record or self.validation

        # Keep the last alerts, without duplicates.
        data, from_start = self._log.read(_LOG_BYTES)
        if from_start:
            self.alerts = []
        distinct = dict.fromkeys(self.alerts + run_files.alerts(data))
        self.alerts = list(distinct)[-_MOST_ALERTS:]

    def _read_metrics(self) -> None:
        """Add the new records of the metrics file. When a long file is opened for the first time, sample all
        of it except its end.
        """
        data, from_start = self._metrics.read(_WHOLE_BYTES)
        if from_start:
            self.curves = {}
            self.last = {}
            steps = self._files.options().get("training.steps")
            self.total_steps = steps if type(steps) is int else 0
            if self._metrics.skipped:
                self._sample()
        for line in data.splitlines():
            self._take(line)

    def _account(self, is_over: bool) -> Account:
        """Return the division of wall time: from ``goodput.jsonl`` if the run is over, else from the last record."""
        if not is_over:
            return Account.from_record(self.last)
        with contextlib.suppress(DataError):
            if not self.account.attempts:
                self.account = self._files.account() or Account.from_record(self.last)
            return self.account
        # The file is damaged.
        return Account.from_record(self.last)

    def _sample(self) -> None:
        """Read some records of the part before the end of the metrics file, evenly spaced."""
        try:
            with open(self._metrics.path, "rb", opener=atomic_io.without_waiting) as file:
                older = os.fstat(file.fileno()).st_size - _WHOLE_BYTES
                for number in range(_SAMPLES):
                    file.seek(number * older // _SAMPLES)
                    lines = file.read(_SAMPLE_BYTES).split(b"\n")
                    # The first and the last line may be incomplete.
                    if len(lines) > 2:
                        self._take(lines[1])
        except OSError:
            return

    def _take(self, line: bytes) -> None:
        """Add the record of a line to the curves."""
        record = run_files.step_record(line)
        if record is None:
            return
        step = record["step"]
        # After a rollback to a checkpoint, later points belong to steps that the run repeats.
        if self.last and step <= self.last["step"]:
            for name, (steps, values) in self.curves.items():
                # Steps are in ascending order.
                num_kept = bisect.bisect_left(steps, step)
                self.curves[name] = steps[:num_kept], values[:num_kept]
        self.last = record
        for name in CURVES:
            value = record.get(name)
            if not isinstance(value, int | float) or not math.isfinite(value):
                continue
            steps, values = self.curves.setdefault(name, ([], []))
            steps.append(step)
            values.append(float(value))
            if len(steps) > POINTS:
                self.curves[name] = _thinned(steps, values)


def _thinned(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """Return at most half as many points, spread evenly over the steps, including the first and the last."""
    distance = (steps[-1] - steps[0]) / (POINTS // 2 - 1)
    kept_steps = steps[:1]
    kept_values = values[:1]
    last_index = len(steps) - 1
    for index in range(1, len(steps)):
        is_far = steps[index] - kept_steps[-1] >= distance
        if is_far or index == last_index:
            kept_steps.append(steps[index])
            kept_values.append(values[index])
    return kept_steps, kept_values
