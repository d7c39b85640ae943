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

from shardtrain.utils import python_child, stop_signals
from shardtrain.utils.redact import one_line

PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "SYSTEMROOT")
"""Environment variables that the child needs to find Python and its packages. It gets no tokens or proxies."""
_ANSWER_BYTES = 16 * 1024
_WALL_FACTOR = 4
_START_SECONDS = 60
"""Maximum time for starting the child, which may be slow on a busy machine."""


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
    """


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
    late = threading.Timer(wall_seconds(), child.kill)
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
        _spent += _of_children() - before
        for pipe in filter(None, (child.stdin, child.stdout)):
            with contextlib.suppress(OSError):
                pipe.close()
    return _verdict(answer, status)


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
        return refused
    # There is no answer. The kernel or the timer has killed the child, or it could not allocate memory.
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"takes more than data.artefact_seconds={_limits.seconds} to open"
    return f"needs more than data.artefact_memory_bytes={_limits.memory_bytes} to open, or its library fails on it"
