"""How a run ends for each signal and phase: one table for the code, ``docs/launch.md`` and the tests."""

from __future__ import annotations

from dataclasses import dataclass

from shardtrain.utils.errors import NotSaved, Preempted

REQUESTS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGALRM")
"""Signals that ask a run to save and to end. A second SIGINT ends it at once."""


@dataclass(frozen=True)
class RunEnd:
    """The exit status, the line on the terminal, and whether ``exit.json`` says the same."""

    code: int
    line: str = ""
    writes_exit_json: bool = True


UNREAD = RunEnd(
    Preempted.exit_code,
    "stopped by {reason} before the configuration was read; the same command starts the run",
    writes_exit_json=False,  # the run folder is not known yet
)
BEFORE_FIRST_STEP = RunEnd(
    Preempted.exit_code, "stopped by {reason} before the first step; the same command continues from there"
)
SAVED = RunEnd(
    Preempted.exit_code,
    "stopped by {reason} after step {step}; everything is saved in {folder}; the same command continues from there",
)
AT_ONCE = RunEnd(NotSaved.exit_code, "stopped by {reason}; nothing was saved on the way out{kept}")
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
    # before ranks start, the first one of two has ended the process
    "SIGINT twice": {**dict.fromkeys(_REQUESTED, AT_ONCE), "arguments": UNREAD, "preflight": BEFORE_FIRST_STEP},
    # as shells count; the next start in the folder says that this one was killed
    "SIGKILL": dict.fromkeys(_REQUESTED, RunEnd(128 + 9, writes_exit_json=False)),
    "SIGSTOP, then SIGCONT": dict.fromkeys(_REQUESTED, DONE),
}
"""Signal to the process that was started -> phase in which it arrives -> the end of a run with checkpoints.

``arguments`` is reading the configuration, ``preflight`` checking data, tokenizer and model.
"""
