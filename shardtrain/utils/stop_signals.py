"""Signals that request the end of a run: their names, their handlers, and protection of child processes from them.

This module imports only the standard library, so a command can handle requests before it imports the rest.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

REQUESTS = (
    "SIGTERM",
    "SIGINT",
    "SIGHUP",
    "SIGUSR1",
    "SIGUSR2",
    "SIGQUIT",
    "SIGALRM",
    "SIGXCPU",
    "SIGPWR",
)
"""Signals that request a save and the end of the run. A second SIGINT ends it immediately.

Batch systems send SIGXCPU before a limit of CPU time, and containers SIGPWR when they are stopped."""
GRACEFUL = tuple(getattr(signal, name) for name in REQUESTS if hasattr(signal, name))
"""Signals of ``REQUESTS`` that this system supports."""
FROM_OUTSIDE = tuple(number for number in GRACEFUL if number != signal.SIGXCPU)
"""Requests of users and schedulers. The kernel also sends SIGXCPU, to a process that exceeds its own limit."""
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


def handle_requests(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers,
) -> dict[int, Any]:
    """Set the handler of all requests to stop, and return the replaced handlers.
    Call this in the main thread.

    An ignored SIGHUP stays ignored, because ``nohup`` relies on it. Pass ``signal.SIG_IGN`` when the end of
    this process is decided. Otherwise a late signal may change the exit status, so ``exit.json`` would be
    wrong: while the interpreter exits, Python restores default handlers, except for ignored signals.
    """
    numbers = [n for n in GRACEFUL if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in numbers}


@contextlib.contextmanager
def children_ignore_requests() -> Iterator[None]:
    """Block requests to stop in the processes that this thread starts in the context.

    A scheduler may signal every process of a job. A helper process that dies of the signal would look like a
    failure of its task. Its parent decides instead: it waits for the helper, or kills it.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, FROM_OUTSIDE)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def die_with_parent(number: int) -> None:
    """Make the kernel send this process a signal when its parent ends. No-op except on Linux."""
    if sys.platform == "linux":
        import ctypes  # here, because handlers of requests are set before other imports

        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, number, 0, 0, 0)
