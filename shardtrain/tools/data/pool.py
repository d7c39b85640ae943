"""Worker processes for numbered units of work, with results in JSON.

The outcome does not depend on the number of processes. Units are started in order. If several fail, the
error of the earliest is raised, after all units before it are done.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from shardtrain.utils.errors import (
    ConfigError,
    DataError,
    OutOfMemoryError,
    PeerError,
    ShardtrainError,
    StorageError,
)

Say = Callable[[dict[str, Any]], None]
Work = Callable[[int, Say], dict[str, Any]]
_QUEUED = 2
"""Units assigned to a process: the current one and the next, so it never waits for the main process."""
_SAY_SECONDS = 0.25
_LOOK_SECONDS = 0.5


@dataclass
class _Worker:
    process: Any
    connection: Connection
    units: deque[int] = field(default_factory=deque)


def run(
    num_units: int, skip: set[int], work: Work, processes: int
) -> Iterator[
    tuple[
        int | None,
        dict[str, Any],
    ]
]:
    """Run ``work(unit, say)`` in forked processes for units 0..num_units-1 except ``skip``.

    ``say`` reports progress. Its argument and the result of ``work`` are JSON objects.

    Yields:
        ``(unit, result)`` for each finished unit, in any order, and ``(None, progress)`` at least twice a
            second.

    Raises:
        ShardtrainError: the error of the first unit that failed.
        PeerError: a process died.
    """
    todo = (unit for unit in range(num_units) if unit not in skip)
    num_workers = min(processes, max(1, num_units - len(skip)))
    workers = _start(num_workers, work)
    failed: dict[int, ShardtrainError] = {}
    try:
        while True:
            # Assign units in order. After a failure, assign no more.
            for worker in workers:
                while not failed and len(worker.units) < _QUEUED:
                    unit = next(todo, None)
                    if unit is None:
                        break
                    worker.units.append(unit)
                    # If the process died, _receive reads its remaining messages and then reports
                    # its death.
                    with suppress(OSError):
                        _send(worker.connection, {"unit": unit})

            # Wait for units before the first failed one, because an earlier failure must be
            # reported instead.
            first_failed = min(failed, default=num_units)
            earliest = min((unit for worker in workers for unit in worker.units), default=num_units)
            if earliest >= first_failed:
                break
            yield from _receive(workers, failed)
        if failed:
            raise failed[min(failed)]
    finally:
        _stop(workers)


def _start(count: int, work: Work) -> list[_Worker]:
    # Forked processes share the opened source and tokenizer. Forking is safe because no other
    # thread, which might hold a lock, runs here.
    context = multiprocessing.get_context("fork")
    workers: list[_Worker] = []
    for _ in range(count):
        ours, theirs = context.Pipe()
        # A fork copies our ends of all pipes. The process closes these copies.
        copies = [ours, *(worker.connection for worker in workers)]
        process = context.Process(target=_serve, args=(theirs, copies, work), daemon=True)
        process.start()
        theirs.close()
        workers.append(_Worker(process, ours))
    return workers


def _stop(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.connection.close()
        worker.process.terminate()
    for worker in workers:
        worker.process.join()


def _receive(
    workers: list[_Worker], failed: dict[int, ShardtrainError]
) -> Iterator[
    tuple[
        int | None,
        dict[str, Any],
    ]
]:
    """Wait up to ``_LOOK_SECONDS`` for messages of the processes, and yield progress and results."""
    by_connection = {worker.connection: worker for worker in workers}
    ready = wait(list(by_connection), timeout=_LOOK_SECONDS)
    for connection in ready:
        worker = by_connection[connection]  # type: ignore[index]
        try:
            message = json.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            raise PeerError(_death(worker)) from None
        if "failed" in message:
            failed[worker.units.popleft()] = _error(message)
        elif "done" in message:
            yield worker.units.popleft(), message["done"]
        else:
            yield None, message
    # Let the caller update its progress even without a message.
    yield None, {}


def _death(worker: _Worker) -> str:
    """Describe how a process ended."""
    worker.process.join(5)
    code = worker.process.exitcode
    reason = f"status {code}"
    if code is not None and code < 0:
        reason = f"signal {-code} ({signal.Signals(-code).name})"
    # The kernel kills the largest process with this signal.
    if code == -signal.SIGKILL:
        reason += "; the machine may be out of memory: use fewer --processes"
    unit = f" at unit {worker.units[0]}" if worker.units else ""
    return (
        f"process {worker.process.pid} died{unit} with {reason}; start the same command again: it continues where "
        "it stopped"
    )


def _serve(connection: Connection, foreign: list[Connection], work: Work) -> None:
    """Main function of a worker process: run units until the connection closes."""
    # The fork copied the parent's pipe connections. While one of them is open here, the pipes would not
    # close when the parent exits, so its workers would keep running.
    for other in foreign:
        other.close()
    # Ctrl-C also reaches the parent, which stops its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # There is one process per core, so threads of a tokenizer would only compete with them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    say = _Sayer(connection, os.getppid())
    while True:
        try:
            unit = json.loads(connection.recv_bytes())["unit"]
        except (EOFError, OSError):
            return
        answer: dict[str, Any]
        try:
            answer = {"done": work(unit, say)}
            say.flush()
        except ShardtrainError as error:
            # A ConfigError has several problems. Other errors have only their text.
            problems = [str(problem) for problem in getattr(error, "problems", (error,))]
            answer = {"failed": type(error).__name__, "problems": problems}
        except MemoryError:
            answer = {
                "failed": "OutOfMemoryError",
                "problems": ["memory ran out; use fewer --processes"],
            }
        except Exception:
            answer = {"failed": "", "problems": [traceback.format_exc()]}
        try:
            _send(connection, answer)
        except OSError:
            return


class _Sayer:
    """Add up progress and send it a few times per second. Exit the process if its parent has ended."""

    def __init__(self, connection: Connection, parent: int) -> None:
        self._connection = connection
        self._parent = parent
        self._sums: dict[str, Any] = {}
        self._sent = time.monotonic()

    def __call__(self, numbers: dict[str, Any]) -> None:
        if os.getppid() != self._parent:
            os._exit(0)
        for name, number in numbers.items():
            self._sums[name] = self._sums.get(name, 0) + number
        if time.monotonic() - self._sent >= _SAY_SECONDS:
            self.flush()

    def flush(self) -> None:
        if os.getppid() != self._parent:
            os._exit(0)
        if self._sums:
            _send(self._connection, self._sums)
        self._sums = {}
        self._sent = time.monotonic()


def _send(connection: Connection, message: dict[str, Any]) -> None:
    # Connection.send would pickle the message.
    connection.send_bytes(json.dumps(message).encode())


def _error(message: dict[str, Any]) -> ShardtrainError:
    """Rebuild the error of a process from its message."""
    problems = message["problems"]
    text = "\n".join(problems)
    if message["failed"] == "ConfigError":
        return ConfigError(problems)
    for kind in (DataError, StorageError, OutOfMemoryError):
        if message["failed"] == kind.__name__:
            return kind(text)
    return ShardtrainError(f"a process that prepares data failed:\n{text}")
