"""What holds for a process of ours: no secret in what Python prints, no file for all to write, enough open files.

And it does not end because nobody reads what it says: a terminal that was closed, a pipe to ``head``, a full disk.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any

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
    keep_streams()
    mask_uncaught()
    mask = os.umask(OTHERS_WRITE)  # the only portable way to read the umask is to set it
    os.umask(mask | OTHERS_WRITE)
    allow_open_files()


class _Lossy(io.FileIO):
    """A descriptor of which nobody misses what cannot be written."""

    def write(self, data: Any, /) -> int:
        """Write, or lose it: there is no other place to say so."""
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


class _Told(io.FileIO):
    """A descriptor that remembers why it could not be written."""

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write, and remember what is raised."""
        try:
            return super().write(data)
        except OSError as error:
            _Told.error = error
            raise


def lost_output() -> OSError | None:
    """Why stdout could not be written, once it could not: its reader has left, or its disk is full."""
    return _Told.error


def keep_streams() -> None:
    """Keep standard streams usable if they are closed, lost, or cannot encode a character.

    A stream that was closed when this process started becomes the null device. Otherwise a file that is opened later
    would get its number, and the output of libraries. Output that cannot be written to stderr is lost and ends nothing:
    the log, the metrics and ``exit.json`` are files. Write errors of stdout are errors, because most verbs exist for
    their output. Characters that a stream's encoding lacks are written as escapes.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The system gives the lowest number that is free, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if _is_of(1, sys.stdout, sys.__stdout__):
        sys.stdout = _reopened(sys.stdout, _Told(1, "w", closefd=False))
    if _is_of(2, sys.stderr, sys.__stderr__):
        sys.stderr = _reopened(sys.stderr, _Lossy(2, "w", closefd=False), is_for_people=True)


def _is_of(number: int, stream: Any, of_python: Any) -> bool:
    """Whether a stream is the one that Python made of a descriptor, or was closed, and nobody's own."""
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
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=lines, write_through=is_for_people)


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
