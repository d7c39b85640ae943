"""What holds for a process of ours: no secret in what Python prints, no file for all to write, enough open files."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from types import TracebackType

from shardtrain.utils.atomic_io import umask
from shardtrain.utils.redact import redact, visible

OTHERS_WRITE = 0o002
STORE = "SHARDTRAIN_STORE"
"""Names the folder in which the ranks of one machine meet, in place of MASTER_ADDR and MASTER_PORT."""
AT_ADDRESS = "address"
"""Its value where tasks of Slurm that see no common folder on their node are to meet at the address."""

SECRET = "SHARDTRAIN_SECRET"
"""What the nodes of one run know and nobody else does: they sign with it what they tell each other while they meet."""


def meeting_folder(environment: Mapping[str, str]) -> str:
    """The folder in which the ranks of one machine meet; empty where they meet at an address."""
    return "" if environment.get(STORE) == AT_ADDRESS else environment.get(STORE, "")


def own_process() -> None:
    """Set all of it for this process and those that it starts; a program that only calls this package keeps its own."""
    mask_uncaught()
    os.umask(umask() | OTHERS_WRITE)
    allow_open_files()


def allow_open_files() -> float:
    """Raise the limit of open files to what the system allows this user, and give it; infinite where there is none.

    A shell's usual 1,024 are fewer than the connections of some 500 ranks that meet, or of as many hosts by ssh.
    """
    try:
        import resource
    except ModuleNotFoundError:  # not a Unix
        return math.inf
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS tells of more than it gives
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return math.inf if soft == resource.RLIM_INFINITY else soft


def mask_uncaught() -> None:
    """Redact what Python prints of exceptions that nobody catches, in the main thread and in others."""

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
            return
        sys.stderr.write(redact(visible("".join(traceback.format_exception(kind, error, trace)))))

    def show_of_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit and args.exc_value is not None:
            show(args.exc_type, args.exc_value, args.exc_traceback)

    sys.excepthook = show
    threading.excepthook = show_of_thread
