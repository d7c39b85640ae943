"""Processes that do numbered work in order, and say in JSON what became of it.

Results are the same for any number of processes: units are handed out in their order, and of several failures the one
of the earliest unit is raised, after all earlier units are done.
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

from shardtrain.utils import errors
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
"""Units that a process has at hand: one in work and one next, so that it never waits for this one."""
_SAY_SECONDS = 0.25
_LOOK_SECONDS = 0.5


@dataclass
class _Worker:
    process: Any
    connection: Connection
    units: deque[int] = field(default_factory=deque)


def run(num_units: int, skip: set[int], work: Work, processes: int) -> Iterator[tuple[int | None, dict[str, Any]]]:
    """Do units 0..num_units-1 but ``skip``: yields ``(unit, result)`` as they are done, ``(None, news)`` in between.

    ``work(unit, say)`` runs in a forked process; what it says, and its result, are JSON objects. News come at least
    twice a second, empty ones too.

    Raises:
        ShardtrainError: what ``work`` raised, of the first unit that failed.
        PeerError: when a process died.
    """
    todo = (unit for unit in range(num_units) if unit not in skip)
    workers = _start(min(processes, max(1, num_units - len(skip))), work)
    failed: dict[int, ShardtrainError] = {}
    try:
        while True:
            # Hand out units in their order, and none after a failure.
            for worker in workers:
                while not failed and len(worker.units) < _QUEUED:
                    unit = next(todo, None)
                    if unit is None:
                        break
                    worker.units.append(unit)
                    with suppress(OSError):  # of one that died, _hear reads what it still said, and then its end
                        _send(worker.connection, {"unit": unit})

            # Units before the first that failed are waited for: an earlier one may still fail, and is the one to tell.
            first = min(failed, default=num_units)
            if not any(unit < first for worker in workers for unit in worker.units):
                break
            yield from _hear(workers, failed)
        if failed:
            raise failed[min(failed)]
    finally:
        _stop(workers)


def _start(count: int, work: Work) -> list[_Worker]:
    # Forked, so that the source and the tokenizer are opened once for all. A fork copies locks that other threads hold,
    # and no thread of ours runs here.
    context = multiprocessing.get_context("fork")
    workers: list[_Worker] = []
    for _ in range(count):
        ours, theirs = context.Pipe()
        others = [worker.connection for worker in workers]
        process = context.Process(target=_serve, args=(theirs, [ours, *others], work), daemon=True)
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


def _hear(workers: list[_Worker], failed: dict[int, ShardtrainError]) -> Iterator[tuple[int | None, dict[str, Any]]]:
    """Wait a moment for what the processes say."""
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
    yield None, {}


def _death(worker: _Worker) -> str:
    worker.process.join(5)
    code = worker.process.exitcode
    how = f"signal {-code} ({signal.Signals(-code).name})" if code is not None and code < 0 else f"status {code}"
    hint = "; the machine may be out of memory: use fewer --processes" if code == -signal.SIGKILL else ""
    unit = f" at unit {worker.units[0]}" if worker.units else ""
    return (
        f"process {worker.process.pid} died{unit} with {how}{hint}; start the same command again: it continues where "
        "it stopped"
    )


def _serve(connection: Connection, foreign: list[Connection], work: Work) -> None:
    """A process: does units until its connection closes."""
    # The parent's ends of the pipes were copied by the fork: while one is open here, its death could not be noticed.
    for other in foreign:
        other.close()
    # Ctrl-C reaches the parent too, which stops its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # These processes are the parallelism; threads below them would fight for the same cores.
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
            problems = [str(problem) for problem in getattr(error, "problems", (error,))]
            answer = {"failed": type(error).__name__, "problems": problems}
        except MemoryError:
            answer = {"failed": "OutOfMemoryError", "problems": ["memory ran out; use fewer --processes"]}
        except Exception:
            answer = {"failed": "", "problems": [traceback.format_exc()]}
        try:
            _send(connection, answer)
        except OSError:
            return


class _Sayer:
    """Adds up numbers and sends them a few times a second; ends the process when its parent is gone."""

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
    # JSON, as Connection.send would pickle
    connection.send_bytes(json.dumps(message).encode())


def _error(message: dict[str, Any]) -> ShardtrainError:
    kinds: tuple[type[ShardtrainError], ...] = (ConfigError, DataError, StorageError, OutOfMemoryError)
    kind = next((kind for kind in kinds if kind.__name__ == message["failed"]), None)
    if kind is ConfigError:
        return ConfigError(message["problems"])
    if kind is not None:
        return kind("\n".join(message["problems"]))
    return errors.ShardtrainError("a process that prepares data failed:\n" + "\n".join(message["problems"]))
