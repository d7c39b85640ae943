"""Run a function on n forked processes, with or without a process group: they share what the parent has imported."""

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
"""How long ranks may take in all: a mesh that hangs is a finding too."""
FULL_TIMEOUT_SECONDS = 3600
"""The same for a model of its full size."""
PROBE_TIMEOUT_SECONDS = 120
"""The same for one forward pass of a small model."""

NO_ANSWER = ("did not answer in", ": died")
"""How a sentence tells of a rank that said nothing: one that hung, or that the system ended."""

GRACE_SECONDS = 1.0
"""How long others may take to answer once a rank has failed."""


class RankFailed(Exception):
    """A rank ended with an error, died or hung; ``refused`` says that the configuration was found not to work."""

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
) -> list[Any]:
    """The results (what JSON can hold) of ``function(rank, num_ranks, *arguments)`` of each process, in order of rank.

    With ``backend`` the processes have a process group, which meets through a file in ``folder``: no port is opened.

    Raises:
        RankFailed: a process raised, died, or did not answer in time; the others are stopped.
    """
    # Forked: ranks share what this process has imported, and it has computed nothing yet, so that no thread of PyTorch
    # holds a lock that a fork would copy.
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    sys.stdout.flush()  # a fork would print what is buffered again
    sys.stderr.flush()
    processes = [
        context.Process(
            target=_child,
            args=(rank, num_ranks, (folder, backend, limit_seconds), pipes[rank][1], function, arguments),
            daemon=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()  # else the end of a process would not be the end of its pipe
        return _collect([receiver for receiver, _ in pipes], processes, limit_seconds)
    finally:
        _end(processes)


def _collect(receivers: list[Connection], processes: Sequence[BaseProcess], limit_seconds: float) -> list[Any]:
    """The answers of all ranks; raises RankFailed for the first rank that has failed by itself."""
    answers: dict[int, Any] = {}
    failures: list[tuple[bool, int, dict[str, Any]]] = []
    waiting = {receiver: rank for rank, receiver in enumerate(receivers)}
    where = f"{len(receivers)} ranks" if len(receivers) > 1 else "one process"
    end = time.monotonic() + limit_seconds
    with WaitingHeartbeat(f"comparing on {where}") as heartbeat:
        while waiting:
            # The end of a process is waited for as well as that of its pipe, which processes that were forked later
            # hold open.
            ended = {processes[rank].sentinel: receiver for receiver, rank in waiting.items()}
            left = max(0.0, end - time.monotonic())
            if heartbeat.timeout is not None:
                left = min(left, heartbeat.timeout)
            ready: Any = wait([*waiting, *ended], timeout=left)
            ready = {ended.get(one, one) for one in ready}
            if not ready and time.monotonic() < end:
                heartbeat.tell()
                continue
            if not ready:
                break
            for receiver in ready:
                rank = waiting.pop(receiver)
                try:
                    if not receiver.poll():  # it has ended and said nothing
                        raise EOFError
                    answer = json.loads(receiver.recv_bytes())
                except EOFError:
                    answer = {"sentence": _death(processes[rank]), "refused": False}
                if not answer["sentence"]:
                    answers[rank] = answer["value"]
                    continue
                # A rank that lost its peer tells of the connection. The peer itself knows why, and answers soon, so
                # errors of gloo come last in the order of failures.
                failures.append(("gloo" in answer["sentence"], rank, answer))
                end = min(end, time.monotonic() + GRACE_SECONDS)
    if failures:
        _, rank, answer = min(failures, key=lambda failure: failure[:2])
        named = answer["sentence"] if answer["refused"] else f"rank {rank}: {answer['sentence']}"
        raise RankFailed(named, answer["refused"])
    if waiting:
        silent = ", ".join(map(str, sorted(waiting.values())))
        raise RankFailed(f"rank {silent} did not answer in {limit_seconds:.0f} s")
    return [answers[rank] for rank in range(len(receivers))]


def _death(process: BaseProcess) -> str:
    process.join(GRACE_SECONDS)
    if process.exitcode == -signal.SIGKILL:
        return "died: killed by SIGKILL, as a system does whose memory is used up"
    if process.exitcode is not None and process.exitcode < 0:
        return f"died: killed by {signal.Signals(-process.exitcode).name}"
    return f"died: exit status {process.exitcode}"


def _end(processes: Sequence[BaseProcess]) -> None:
    end = time.monotonic() + 1.0  # those that have answered are about to end; others wait for a peer that has ended
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
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # PyTorch's notes to developers, once for each rank of each mesh
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank))
    try:
        folder, backend, limit_seconds = group
        if backend:
            store = dist.FileStore(str(folder / "store"), num_ranks)
            limit = timedelta(seconds=limit_seconds)
            dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=limit)
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
    os._exit(0)  # skip the parent's exit handlers, which are not this process's to run
