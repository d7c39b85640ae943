"""Table of the possible ends of a run, by signal and phase. The code, ``docs/launch.md`` and the tests use it."""

from __future__ import annotations

from dataclasses import dataclass

from shardtrain.utils.errors import NotSaved, Preempted
from shardtrain.utils.stop_signals import REQUESTS

IGNORED = ("SIGPIPE", "SIGXFSZ")
"""Signals that Python ignores: the call that caused one raises an OSError."""


@dataclass(frozen=True)
class RunEnd:
    """Exit status and terminal line of a run's end.

    ``writes_exit_json`` is True if the run writes ``exit.json``.
    """

    code: int
    line: str = ""
    writes_exit_json: bool = True


UNREAD = RunEnd(
    Preempted.exit_code,
    "stopped by {reason} before the configuration was read; the same command starts the run",
    # The run folder is not known yet.
    writes_exit_json=False,
)
BEFORE_FIRST_STEP = RunEnd(
    Preempted.exit_code,
    "stopped by {reason} before the first step; the same command continues from there",
)
SAVED = RunEnd(
    Preempted.exit_code,
    "stopped by {reason} after step {step}; everything is saved in {folder}; the same command continues from there",
)
AT_ONCE = RunEnd(NotSaved.exit_code, "stopped by {reason} without saving{kept}")
DONE = RunEnd(0)
_REQUESTED = {
    "arguments": UNREAD,
    "preflight": BEFORE_FIRST_STEP,
    "ranks starting": BEFORE_FIRST_STEP,
    **dict.fromkeys(("first step", "training", "validation", "saving"), SAVED),
    "after the last step": DONE,
}
TABLE = {
    **dict.fromkeys(REQUESTS, _REQUESTED),
    # Before ranks start, the first SIGINT ends the process.
    "SIGINT twice": {
        **dict.fromkeys(_REQUESTED, AT_ONCE),
        "arguments": UNREAD,
        "preflight": BEFORE_FIRST_STEP,
    },
    # The exit status is that of a shell. The next start in the folder reports that this run was killed.
    "SIGKILL": dict.fromkeys(_REQUESTED, RunEnd(128 + 9, writes_exit_json=False)),
    "SIGSYS": dict.fromkeys(_REQUESTED, RunEnd(128 + 31, writes_exit_json=False)),
    **dict.fromkeys(IGNORED, dict.fromkeys(_REQUESTED, DONE)),
    "SIGSTOP, then SIGCONT": dict.fromkeys(_REQUESTED, DONE),
}
"""Ends of a run with checkpoints, by the signal to the started process and the phase in which it arrives.

In ``arguments``, the configuration is read. In ``preflight``, data, tokenizer and model are checked.
"""
