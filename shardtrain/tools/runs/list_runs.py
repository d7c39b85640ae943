"""The verb ``runs``: the runs below a folder, with the state of each, read from the ends of their files."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtrain.tools.runs.report.chart import format_number
from shardtrain.utils import reading
from shardtrain.utils.arguments import StrictArgumentParser
from shardtrain.utils.checked_json import record_of
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.redact import visible
from shardtrain.utils.units import format_seconds

_DEEPEST = 5
_TAIL_BYTES = 1 << 16
_FRESH_SECONDS = 600.0
"""A run that has written nothing for longer is not said to be under way."""


@dataclass(frozen=True)
class RunStatus:
    """One run: its folder, its last record, what ``exit.json`` says of its newest attempt, and its age in seconds."""

    folder: Path
    last: dict[str, Any]
    end: dict[str, Any]
    age_seconds: float

    @property
    def state(self) -> str:
        """A word or two for the state."""
        if self.end:
            return "ended" if self.end.get("code") == 0 else f"failed ({self.end.get('code')})"
        return "under way" if self.age_seconds < _FRESH_SECONDS else "silent"


def main(words: Sequence[str]) -> int:
    """Print the table; raises ConfigError."""
    parser = StrictArgumentParser(
        "shardtrain runs",
        "List the runs in and below a folder: state, last step and loss, and how long ago they last wrote. "
        "silent: no exit.json, and nothing written for ten minutes.",
        example="shardtrain runs outputs",
    )
    parser.add_argument("folder", nargs="?", default=".", metavar="FOLDER", help="default: this one")
    parser.add_argument("--json", action="store_true", help="one JSON object per run")
    asked = parser.read(words)
    root = Path(asked.folder)
    if not root.is_dir():
        raise ConfigError(
            Problem("FOLDER", asked.folder, "is not a folder", "name one that holds runs", "command line")
        )
    found = sorted(below(root), key=lambda run: run.age_seconds)
    if asked.json:
        for run in found:
            row = {"folder": str(run.folder), "state": run.state, "age_seconds": round(run.age_seconds, 1)}
            print(json.dumps({**row, "step": run.last.get("step"), "loss": run.last.get("loss")}))
        return 0
    if not found:
        print(f"no run in {asked.folder}: none of its folders has a metrics.jsonl")
        return 0
    print(f"{'STATE':<12} {'STEP':>9} {'LOSS':>9} {'AGE':>8}  RUN")
    for run in found:
        step = _number(run.last.get("step"))
        loss = _number(run.last.get("loss"))
        age = format_seconds(round(run.age_seconds))
        print(visible(f"{run.state:<12} {step:>9} {loss:>9} {age:>8}  {run.folder}", lines=False))
    return 0


def below(root: Path) -> Iterator[RunStatus]:
    """The runs in and below a folder, five levels deep; no link is followed, and no run's own folder searched."""
    for folder, names, files in os.walk(root):
        depth = len(Path(folder).relative_to(root).parts)
        if "metrics.jsonl" in files:
            names.clear()
            yield look(Path(folder))
        elif depth >= _DEEPEST:
            names.clear()
        else:
            names[:] = sorted(name for name in names if not name.startswith("."))


def look(folder: Path) -> RunStatus:
    """The state of the run of a folder."""
    metrics = folder / "metrics.jsonl"
    exit_file = folder / "exit.json"
    written = (metrics, exit_file, folder / "goodput.jsonl", folder / "logs/rank-0.log")
    times = {path: _modified(path) for path in written}

    # An exit.json that is older than the last record is of an attempt before this one.
    end: dict[str, Any] = {}
    if times[exit_file] >= times[metrics]:
        try:
            end = json.loads(_tail(exit_file))
        except (ValueError, RecursionError):
            end = {}

    # The last whole record: a line may be torn, where the file is being written.
    last: dict[str, Any] = {}
    for line in reversed(_tail(metrics).split(b"\n")):
        record = record_of(line)
        if record is not None and type(record.get("step")) is int:
            last = record
            break
    return RunStatus(folder, last, end if isinstance(end, dict) else {}, max(0.0, time.time() - max(times.values())))


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _tail(path: Path) -> bytes:
    try:
        return reading.end(path, _TAIL_BYTES)
    except OSError:
        return b""


def _number(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-"
    return str(value) if isinstance(value, int) else format_number(value)
