"""Open an untrusted file in a child process first, with hard limits on memory,
time and the length of its answer.

Native libraries read tokenizers, Parquet and Arrow. If a library allocates too much memory, the kernel
kills its process without an exception. So a child process (``sandbox_child``) opens the file first. The
kernel enforces the child's limits, and the child inherits almost no environment variables. Only if the
child succeeds, this process opens the same bytes, which it identifies by their hash.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardtrain.utils import limits as limits_of_process
from shardtrain.utils import python_child, stop_signals
from shardtrain.utils.errors import OutOfMemoryError
from shardtrain.utils.redact import one_line

PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "SYSTEMROOT")
"""Environment variables that the child needs to find Python and its packages. It gets no tokens or proxies."""
_OF_MEMORY = "data.artefact_memory_bytes"
"""Phrase in the refusals of artefacts that need too much memory."""
_ANSWER_BYTES = 16 * 1024
_WALL_FACTOR = 20
_START_SECONDS = 120
"""Maximum time for starting the child. Both are generous, because a child on a busy machine computes slowly."""


@dataclass(frozen=True)
class Limits:
    """Limits for opening one file: data.artefact_memory_bytes, and data.artefact_seconds of CPU time."""

    memory_bytes: int = 2**30
    seconds: int = 30


_limits = Limits()
_opened_before: set[str] = set()
_spent = 0.0


class Refused(Exception):
    """An artefact cannot be opened within its limits.

    The message is a predicate, such as "needs more than ...".

    Attributes:
        fix: what to do, if the cause is a limit. Empty if the cause is the artefact.
    """

    def __init__(self, rule: str, fix: str = "") -> None:
        super().__init__(rule)
        self.fix = fix


class Failed(Refused):
    """The child failed on an artefact, so nothing is known about the memory and the time that it takes.

    Do not open the artefact in this process, where no limits hold.

    Attributes:
        lines: the lines of the child's error.
        errno: the errno of the child's OSError. 0 for all other errors.
    """

    def __init__(self, lines: Sequence[str], errno: int = 0) -> None:
        super().__init__(f"cannot be opened ({lines[0]})")
        self.lines = tuple(lines)
        self.errno = errno


def set_limits(limits: Limits) -> None:
    """Set the limits for everything that this process opens from now on."""
    global _limits
    _limits = limits


def limits() -> Limits:
    """Return the limits for everything that this process opens."""
    return _limits


def wall_seconds() -> float:
    """Return the maximum time on the clock for a child to start and to answer."""
    return _START_SECONDS + _WALL_FACTOR * _limits.seconds


def spent_seconds() -> float:
    """Return the CPU seconds that children have used since the last call of this function."""
    global _spent
    seconds = _spent
    _spent = 0.0
    return seconds


def open_in_child(kind: str, request: Mapping[str, Any], *keys: str) -> None:
    """Let a child process open an artefact, unless children have already opened all of its ``keys``.

    Args:
        kind: name of a function in ``sandbox_child.OPENERS``.
        request: arguments of this function, as JSON values.
        keys: hashes of the contents, and of everything else that the outcome depends on.

    Raises:
        Refused: the artefact exceeds the limits, or crashes the child.
        Failed: the child reports an error in the artefact.
        OutOfMemoryError: memory ran out under a ulimit of this process, which the child inherits.
    """
    if _opened_before.issuperset(keys):
        return
    answer = _ask(
        {**request, "kind": kind, "memory_bytes": _limits.memory_bytes, "seconds": _limits.seconds}
    )
    if answer:
        raise Refused(answer)
    _opened_before.update(keys)


def _ask(request: Mapping[str, Any]) -> str:
    """Start a child that opens the artefact. Return the refusal, or an empty string. Raises Failed."""
    global _spent
    command = python_child.command("shardtrain.data.sandbox_child")
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    # Use one thread, because threads need address space, which is limited. Use Arrow's memory pool "system",
    # because the others reserve a GiB of address space when they start.
    environment |= {
        "OMP_NUM_THREADS": "1",
        "RAYON_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment["ARROW_DEFAULT_MEMORY_POOL"] = "system"
    before = _of_children()
    # A request to stop is sent to all processes of a job. The child must ignore it. If it died, the error
    # message would blame the artefact.
    with stop_signals.children_ignore_requests():
        child = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    # RLIMIT_CPU does not limit a child that sleeps, so also limit its wall-clock time.
    is_late = threading.Event()

    def stop_late_child() -> None:
        is_late.set()
        child.kill()

    late = threading.Timer(wall_seconds(), stop_late_child)
    late.daemon = True
    late.start()
    try:
        assert child.stdin is not None and child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps(request).encode())
            child.stdin.close()
        # Read one line of limited length, because a compromised child could write forever.
        answer = b""
        while len(answer) < _ANSWER_BYTES and not answer.endswith(b"\n"):
            part = os.read(child.stdout.fileno(), _ANSWER_BYTES - len(answer))
            if not part:
                break
            answer += part
    finally:
        late.cancel()
        # The child has answered or failed, so it is not needed any more.
        child.kill()
        status = child.wait()
        child_seconds = _of_children() - before
        _spent += child_seconds
        for pipe in filter(None, (child.stdin, child.stdout)):
            with contextlib.suppress(OSError):
                pipe.close()
    if is_late.is_set() and not answer.endswith(b"\n"):
        raise _too_late(child_seconds)
    return _verdict(answer, status)


def _too_late(child_seconds: float) -> Refused:
    """Return the refusal of an artefact whose child had no answer in time, but used less CPU time than its limit."""
    rule = (
        f"was not opened within {wall_seconds():.0f} s on the clock ({_START_SECONDS} s + {_WALL_FACTOR} x "
        f"data.artefact_seconds={_limits.seconds}), of which its process computed for {child_seconds:.1f} s"
    )
    return Refused(
        rule, "start again when machine and storage are less busy, or raise data.artefact_seconds"
    )


def _of_children() -> float:
    """Return the CPU seconds of this process's children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _verdict(answer: bytes, status: int) -> str:
    """Return the refusal from the child's answer or its exit status, or an empty string. Raises Failed."""
    try:
        content = json.loads(answer)
        refused = content["refused"]
        lines = [one_line(str(line)) for line in content["failed"]]
        error_number = int(content["errno"])
    except (ValueError, KeyError, TypeError, RecursionError):
        refused = None
    if isinstance(refused, str):
        if lines:
            raise Failed(lines, error_number)
        if _OF_MEMORY in refused:
            _check_ulimits()
        return refused
    # There is no answer. The kernel or the timer has killed the child, or it could not allocate memory.
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"takes more than data.artefact_seconds={_limits.seconds} of CPU time to open"
    _check_ulimits()
    return f"needs more than data.artefact_memory_bytes={_limits.memory_bytes} to open, or its library fails on it"


def _check_ulimits() -> None:
    """Raise OutOfMemoryError if a ulimit of this process is lower than the limit that the child sets itself."""
    for limit in limits_of_process.read():
        if limit.name in limits_of_process.OF_MEMORY and limit.value < _limits.memory_bytes:
            raise OutOfMemoryError(
                f"memory ran out (a child process that opens a file inherits the limit) under {limit.name}="
                f"{limit.format(limit.value)}: {limit.fix}"
            )
