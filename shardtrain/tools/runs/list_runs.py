"""Verb ``runs``: list the runs below a folder with their state."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from shardtrain.tools.runs import run_files
from shardtrain.tools.runs.report.chart import format_number
from shardtrain.utils.arguments import StrictArgumentParser
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.redact import visible
from shardtrain.utils.units import format_seconds


def main(arguments: Sequence[str]) -> int:
    """Print the table and return the exit status. Raise ConfigError if the path is not a folder."""
    parser = StrictArgumentParser(
        "shardtrain runs",
        "List the runs in and below a folder: state, last step and loss, "
        "and the time since the run last wrote a file. "
        '"silent" means that a run has no exit.json and has written nothing for ten minutes.',
        example="shardtrain runs outputs",
    )
    parser.add_argument(
        "folder",
        nargs="?",
        default=".",
        metavar="FOLDER",
        help="default: the current folder",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per run")
    options = parser.read(arguments)
    root = Path(options.folder)
    if not root.is_dir():
        raise ConfigError(
            Problem(
                "FOLDER",
                options.folder,
                rule="is not a folder",
                fix="name a folder with runs",
                where="command line",
            )
        )

    # List the runs that were active most recently first.
    runs = sorted(run_files.below(root), key=lambda run: run.age_seconds)
    if options.json:
        for run in runs:
            row = {
                "folder": str(run.folder),
                "state": run.state,
                "age_seconds": round(run.age_seconds, 1),
                "step": run.last.get("step"),
                "loss": run.last.get("loss"),
            }
            print(json.dumps(row))
        return 0
    if not runs:
        print(f"no run in {options.folder}: none of its folders has a metrics.jsonl")
        return 0
    print(f"{'STATE':<12} {'STEP':>9} {'LOSS':>9} {'AGE':>8}  RUN")
    for run in runs:
        step = _number(run.last.get("step"))
        loss = _number(run.last.get("loss"))
        age = format_seconds(round(run.age_seconds))
        # A folder's name may contain control characters of a terminal.
        print(visible(f"{run.state:<12} {step:>9} {loss:>9} {age:>8}  {run.folder}", lines=False))
    return 0


def _number(value: object) -> str:
    """Format a number of a record, which is untrusted."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-"
    if isinstance(value, int):
        return str(value)
    return format_number(value)
