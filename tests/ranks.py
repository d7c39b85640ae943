"""Run a function on forked ranks with a gloo process group on loopback. A test with four ranks takes about a second.

Forked ranks share the parent's imports, while spawned ones would import everything again. Every wait has a timeout. The
rendezvous uses a file instead of a fixed port.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import patience
import torch
import torch.distributed as dist

TIMEOUT_SECONDS = 300


def run_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return the results of ``function(rank, *arguments)`` of all ranks. Raise AssertionError if a rank fails."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        processes = []
        for rank, (_, sender) in enumerate(pipes):
            rank_arguments = (rank, num_ranks, folder, sender, function, arguments)
            processes.append(context.Process(target=_rank, args=rank_arguments, daemon=True))
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            answers = [_receive(rank, receiver) for rank, (receiver, _) in enumerate(pipes)]
        finally:
            for process in processes:
                process.join(timeout=patience.seconds(5))
                if process.is_alive():
                    process.kill()
                    process.join()
        return _results(answers)


def _receive(rank: int, receiver: Any) -> tuple[bool, Any]:
    limit = patience.seconds(TIMEOUT_SECONDS)
    if not receiver.poll(limit):
        return False, f"did not answer in {limit:.0f} s"
    try:
        return pickle.loads(receiver.recv_bytes())  # type: ignore[no-any-return]
    except EOFError:
        return False, "died"


def _results(answers: list[tuple[bool, Any]]) -> list[Any]:
    """Return the results, or raise the failure that caused the others.

    A rank that lost the connection to a peer is only a consequence.
    """

    def lost_its_peer(failure: tuple[int, str]) -> bool:
        _, text = failure
        return "gloo/transport" in text or "PeerError" in text

    failures = [(rank, text) for rank, (ok, text) in enumerate(answers) if not ok]
    if failures:
        rank, text = min(failures, key=lost_its_peer)
        raise AssertionError(f"rank {rank} failed:\n{text}")
    return [value for _, value in answers]


def _rank(
    rank: int,
    num_ranks: int,
    folder: str,
    sender: Any,
    function: Callable[..., Any],
    arguments: Any,
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank))
    try:
        store = dist.FileStore(f"{folder}/store", num_ranks)
        timeout = timedelta(seconds=patience.seconds(TIMEOUT_SECONDS))
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout
        )
        dist.barrier()  # if a rank ends before another has connected to it, the other reports a crash
        # send plain bytes, because PyTorch's pickler would pass file descriptors of a process that is about to exit
        sender.send_bytes(pickle.dumps((True, function(rank, *arguments))))
        dist.destroy_process_group()
    except BaseException:
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        sender.close()
        os._exit(0)  # skip exit handlers, which are inherited from the parent
