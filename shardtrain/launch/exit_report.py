"""Report a failure from the rank or from the process that watches it, and exit a process immediately."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from shardtrain.launch import failure, greeting, signals
from shardtrain.launch.failure import Failure
from shardtrain.utils import process

ELECTION_SECONDS = 5.0
"""Maximum wait for the store that chooses the rank to report. It is lost with the host of rank 0."""
_elect: Callable[[], bool] | None = None


def elect_with(is_first: Callable[[], bool]) -> None:
    """Set the function that chooses the one rank that reports, if all ranks of a run fail without a launcher of ours.

    It returns True in the first rank that calls it, and False in all later ones.
    """
    global _elect
    _elect = is_first


def _is_first() -> bool:
    """Return True if this rank shall report. Without an answer of the run's store it does."""
    if _elect is None:
        return True
    try:
        return greeting.within(ELECTION_SECONDS, _elect)
    except (TimeoutError, RuntimeError):
        # RuntimeError: no thread can be started
        return True


def record(
    report: Failure, log_path: Path, run_folder: Path, world_size: int, is_cause: bool
) -> None:
    """Write the failure to ``TORCHELASTIC_ERROR_FILE``, if a launcher set it.

    If no shardtrain process watches this rank, the first rank with ``is_cause`` also reports it with ``tell``.
    """
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        failure.write_record(report, os.environ["TORCHELASTIC_ERROR_FILE"])
    if is_cause and not process.is_left_to_parent() and _is_first():
        tell(report, log_path, run_folder, world_size)


def tell(report: Failure, log_path: Path, run_folder: Path, world_size: int, step: int = 0) -> None:
    """Write ``exit.json``, and print the failure that ended a run in one line; see ``failure.write_exit``.

    The file comes first, because ``launch ssh`` takes the code in the line for that in the file.
    """
    if not report.leaves_folder_alone:
        failure.write_exit(run_folder, report, report.exit_code, step)
    print(*failure.lines(report, log_path, world_size), sep="\n", file=sys.stderr, flush=True)


def end(code: int) -> NoReturn:
    """Exit this process from any thread, without waiting for the main thread,
    which may hang in a collective.
    """
    signals.end_children()
    os._exit(code)
