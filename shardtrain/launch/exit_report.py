"""The end of a rank of a run that hangs: who tells of it, and how this process leaves."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from shardtrain.launch import failure
from shardtrain.launch.failure import Failure
from shardtrain.resilience import signals

_parent_speaks = False


def leave_to_parent() -> None:
    """The parent of this rank reads its record, and tells of the failure."""
    global _parent_speaks
    _parent_speaks = True


def record(report: Failure, log_path: Path, run_folder: Path, world_size: int, is_first: bool) -> None:
    """Hand the failure to a launcher that reads records; without our own, the first of the ranks tells of it."""
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        failure.write_record(report, os.environ["TORCHELASTIC_ERROR_FILE"])
    if is_first and not _parent_speaks:
        print(*failure.lines(report, log_path, world_size), sep="\n", file=sys.stderr, flush=True)
        failure.write_exit(run_folder, report, report.exit_code)


def end(code: int) -> NoReturn:
    """Leave at once, from any thread: the main thread waits for what will not come."""
    signals.end_children()
    os._exit(code)
