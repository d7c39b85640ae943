"""Process-wide settings of shardtrain's commands.

Python's tracebacks contain no secrets. New files are not writable for everyone. The limit of open files
is raised. Output that cannot be written (closed terminal, pipe to ``head``, full disk) does not end the
process.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from shardtrain.utils.redact import redact, visible

OTHERS_WRITE = 0o002
STORE = "SHARDTRAIN_STORE"
"""Variable with the rendezvous folder of the ranks of one machine, which replaces MASTER_ADDR and MASTER_PORT."""
AT_ADDRESS = "address"
"""Value of ``STORE`` for Slurm tasks that share no folder on their node, and therefore use MASTER_ADDR."""

SECRET = "SHARDTRAIN_SECRET"
"""Variable with the secret that only the nodes of a run share.

They sign their rendezvous messages with it.
"""
SIGNATURE_PREFIX = b"shardtrain-sha256 "
"""Start of a signed message. The signature and the message follow."""
PARENT = "SHARDTRAIN_PARENT"
"""Environment variable of ranks that a launcher on this machine started: process ID of the launcher."""
AGENT = "SHARDTRAIN_AGENT"
"""Environment variable of ranks of a multi-node run: process ID of the elastic agent of their node."""


def is_left_to_parent() -> bool:
    """True if a shardtrain process watches this rank, reads its record, and reports the end of the run."""
    own_pid = str(os.getpid())
    # The agent of a node has its own process ID in AGENT, for its ranks.
    return any(os.environ.get(name, own_pid) != own_pid for name in (PARENT, AGENT))


def stop_agent() -> None:
    """Ask the agent of this node to stop, because other ranks would wait for this rank, which ends during its start.

    No-op if no agent started this process.
    """
    if os.environ.get(AGENT) == str(os.getppid()):
        os.kill(os.getppid(), signal.SIGTERM)


def meeting_folder(environment: Mapping[str, str]) -> str:
    """Return the rendezvous folder of the ranks of one machine, or "" if they use an address."""
    return "" if environment.get(STORE) == AT_ADDRESS else environment.get(STORE, "")


def own_process() -> None:
    """Apply all settings of this module to this process and its children.

    Only commands call this. A program that imports the package keeps its own settings.
    """
    keep_streams()
    mask_uncaught()
    mask = os.umask(OTHERS_WRITE)  # the only portable way to read the umask is to set it
    os.umask(mask | OTHERS_WRITE)
    allow_open_files()


class _Lossy(io.FileIO):
    """A descriptor that drops data it cannot write."""

    def write(self, data: Any, /) -> int:
        """Write, or drop the data: there is no other stream for a report."""
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


class _ErrorRecorder(io.FileIO):
    """A descriptor that stores its last write error."""

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write. Store the error before raising it."""
        try:
            return super().write(data)
        except OSError as error:
            _ErrorRecorder.error = error
            raise


class _ClosedOutput(io.FileIO):
    """The null device in place of a closed stdout. ``is_used`` is true after the first write."""

    is_used = False

    def write(self, data: Any, /) -> int:
        """Note the write, and drop the data."""
        _ClosedOutput.is_used = True
        return super().write(data)


def wrote_to_closed_output() -> bool:
    """True if stdout was closed when this process started, and something was printed since."""
    return _ClosedOutput.is_used


def lost_output() -> OSError | None:
    """Return the write error of stdout (its reader has exited, or its disk is full), or None."""
    return _ErrorRecorder.error


def keep_streams() -> None:
    """Keep standard streams usable if they are closed, lost, or cannot encode a character.

    A stream that was closed when this process started becomes the null device. Otherwise a file that is
    opened later would get its descriptor number and receive the output of libraries. Output that cannot
    be written to stderr is dropped, because the log, the metrics and ``exit.json`` are files. Write
    errors of stdout are raised, because most verbs exist for their output. Characters that the stream's
    encoding lacks are written as escapes.
    """
    stdout: type[io.FileIO] = _ErrorRecorder
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            if number == 1:
                stdout = _ClosedOutput
            # open() returns the lowest free descriptor, which is the one that is closed here.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if _is_of(1, sys.stdout, sys.__stdout__):
        sys.stdout = _reopened(sys.stdout, stdout(1, "w", closefd=False))
    if _is_of(2, sys.stderr, sys.__stderr__):
        sys.stderr = _reopened(sys.stderr, _Lossy(2, "w", closefd=False), is_for_people=True)


def _is_of(number: int, stream: Any, of_python: Any) -> bool:
    """True if a stream is closed or is Python's original stream of a descriptor, so it may be replaced."""
    return stream is None or (stream is of_python and stream.fileno() == number)


def _reopened(old: Any, raw: io.FileIO, is_for_people: bool = False) -> io.TextIOWrapper:
    """Return a text stream on ``raw`` that replaces ``old``, a standard stream or None if it was closed."""
    encoding = "utf-8"
    errors = "backslashreplace"
    if old is not None:
        old.flush()
        encoding = old.encoding
        # Replace Python's default error handlers, because they raise. Keep a handler set by PYTHONIOENCODING.
        if old.errors not in ("strict", "surrogateescape"):
            errors = old.errors
    lines = is_for_people or raw.isatty()
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding, errors, line_buffering=lines, write_through=is_for_people
    )


def allow_open_files() -> float:
    """Raise the soft limit of open files to the hard limit. Return it, infinite if unlimited.

    The usual soft limit of 1,024 is too small for the connections of about 500 ranks or ssh hosts.
    """
    try:
        import resource
    except ModuleNotFoundError:  # not a Unix
        return math.inf
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # macOS reports a hard limit that it does not allow
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return math.inf if soft == resource.RLIM_INFINITY else soft


def mask_uncaught() -> None:
    """Redact the tracebacks of uncaught exceptions in all threads, and print one line for Ctrl-C."""

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            # Python then ends the process by SIGINT, as a shell expects.
            sys.stderr.write("stopped by SIGINT\n")
            return
        sys.stderr.write(redact(visible("".join(traceback.format_exception(kind, error, trace)))))

    def show_of_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit and args.exc_value is not None:
            show(args.exc_type, args.exc_value, args.exc_traceback)

    sys.excepthook = show
    threading.excepthook = show_of_thread
