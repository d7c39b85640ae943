"""Run a function on n forked processes, with or without a process group."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from shardtrain.utils.errors import ConfigError
from shardtrain.utils.heartbeat import WaitingHeartbeat

TIMEOUT_SECONDS = 300
"""Time limit of one mesh. A mesh that hangs is also a finding."""
FULL_TIMEOUT_SECONDS = 3600
"""Time limit of one mesh with a model of full size."""
PROBE_TIMEOUT_SECONDS = 120
"""Time limit of one forward pass of a small model."""

NO_ANSWER = ("did not answer in", ": died")
"""Substrings of the messages about ranks that hung or were killed."""

GRACE_SECONDS = 1.0
"""Time for other ranks to answer after one has failed."""


class RankFailed(Exception):
    """A rank raised an exception, died or hung. ``refused`` is True if it raised a ConfigError."""

    def __init__(self, sentence: str, refused: bool = False) -> None:
        super().__init__(sentence)
        self.refused = refused


def run(
    num_ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    folder: Path,
    backend: str = "",
    limit_seconds: float = TIMEOUT_SECONDS,
    may_fork: bool = False,
) -> list[Any]:
    """Run ``function(rank, num_ranks, *arguments)`` in each process, and return the results in the
    order of ranks.

    Results must be JSON values. With ``backend``, the processes have a process group with a file store in
    ``folder``, so no port is opened. With ``may_fork``, they may start processes themselves, as loader workers.

    Raises:
        RankFailed: a process raised an exception, died, or did not answer in time. The others are stopped.
    """
    # Forked ranks do not need to import modules again. This process has not computed anything, so
    # no PyTorch thread holds a lock that the forks would copy.
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    # Flush, because otherwise the forks would print buffered output again.
    sys.stdout.flush()
    sys.stderr.flush()
    group = (folder, backend, limit_seconds)
    processes = []
    for rank, (_, sender) in enumerate(pipes):
        child_arguments = (rank, num_ranks, group, sender, function, arguments)
        processes.append(context.Process(target=_child, args=child_arguments, daemon=not may_fork))
    try:
        for process in processes:
            process.start()
        # A pipe reports its end only if no process has its sending side open.
        for _, sender in pipes:
            sender.close()
        return _collect([receiver for receiver, _ in pipes], processes, limit_seconds)
    finally:
        _end(processes)


def _collect(
    receivers: list[Connection],
    processes: Sequence[BaseProcess],
    limit_seconds: float,
) -> list[Any]:
    """Return the answers of all ranks.

    Raises:
        RankFailed: a rank failed. The message names the first rank that did not fail because of another.
    """
    answers: dict[int, Any] = {}
    failures: list[tuple[bool, int, dict[str, Any]]] = []  # (is an error of gloo, rank, answer)
    waiting = {receiver: rank for rank, receiver in enumerate(receivers)}
    where = f"{len(receivers)} ranks" if len(receivers) > 1 else "one process"
    end = time.monotonic() + limit_seconds
    with WaitingHeartbeat(f"comparing on {where}") as heartbeat:
        while waiting:
            # Also wait for the end of processes, because forks of other ranks may keep the pipe of
            # a dead process open.
            receiver_by_sentinel = {
                processes[rank].sentinel: receiver for receiver, rank in waiting.items()
            }
            timeout = max(0.0, end - time.monotonic())
            if heartbeat.timeout is not None:
                timeout = min(timeout, heartbeat.timeout)
            events: Any = wait([*waiting, *receiver_by_sentinel], timeout=timeout)
            ready = {receiver_by_sentinel.get(event, event) for event in events}
            if not ready:
                if time.monotonic() >= end:
                    break
                heartbeat.tell()
                continue
            for receiver in ready:
                rank = waiting.pop(receiver)
                answer = _receive(receiver, processes[rank])
                if not answer["sentence"]:
                    answers[rank] = answer["value"]
                    continue
                # A rank that lost its peer reports a gloo error. The peer knows the reason and answers soon,
                # so sort gloo errors last.
                failures.append(("gloo" in answer["sentence"], rank, answer))
                end = min(end, time.monotonic() + GRACE_SECONDS)
    if failures:
        _, rank, answer = min(failures, key=lambda failure: failure[:2])
        sentence = answer["sentence"]
        if not answer["refused"]:
            sentence = f"rank {rank}: {sentence}"
        raise RankFailed(sentence, answer["refused"])
    if waiting:
        silent = ", ".join(map(str, sorted(waiting.values())))
        raise RankFailed(f"rank {silent} did not answer in {limit_seconds:.0f} s")
    return [answers[rank] for rank in range(len(receivers))]


def _receive(receiver: Connection, process: BaseProcess) -> dict[str, Any]:
    """Read the answer of a process. If it ended without an answer, describe how it ended."""
    try:
        if receiver.poll():
            answer: dict[str, Any] = json.loads(receiver.recv_bytes())
            return answer
    except EOFError:
        pass
    return {"sentence": _death(process), "refused": False}


def _death(process: BaseProcess) -> str:
    """Describe how a process without an answer ended."""
    process.join(GRACE_SECONDS)
    if process.exitcode == -signal.SIGKILL:
        return "died: killed by SIGKILL, as the system does when memory runs out"
    if process.exitcode is not None and process.exitcode < 0:
        return f"died: killed by {signal.Signals(-process.exitcode).name}"
    return f"died: exit status {process.exitcode}"


def _end(processes: Sequence[BaseProcess]) -> None:
    """Kill all processes that do not end within a second, because they may wait for a rank that has ended."""
    end = time.monotonic() + 1.0
    for process in processes:
        if process.pid is None:
            continue
        process.join(timeout=max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _child(
    rank: int,
    num_ranks: int,
    group: tuple[Path, str, float],
    sender: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """Run the function in a forked process, send its result or error, and exit."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # Hide PyTorch's warnings, which are for developers and would appear once for each rank of each mesh.
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank))
    try:
        folder, backend, limit_seconds = group
        if backend:
            store = dist.FileStore(str(folder / "store"), num_ranks)
            limit = timedelta(seconds=limit_seconds)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=num_ranks, timeout=limit
            )
        answer = {"sentence": "", "refused": False, "value": function(rank, num_ranks, *arguments)}
    except ConfigError as error:
        answer = {"sentence": str(error), "refused": True, "value": None}
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).strip().splitlines() or [""]
        sentence = f"{type(error).__name__}: {text[0]} ({Path(place.filename).name}:{place.lineno})"
        sentence = "; ".join([sentence, *getattr(error, "__notes__", [])])
        answer = {"sentence": sentence, "refused": False, "value": None}
    with contextlib.suppress(BrokenPipeError):
        sender.send_bytes(json.dumps(answer).encode())
        sender.close()
    # Skip exit handlers, which belong to the parent process.
    os._exit(0)
