"""Connections of a rank and the time to set up gloo process groups, by number of ranks.

    python benchmarks/gloo_groups.py [--ranks 8 32 64 128]

Forks real ranks that rendezvous in a TCPStore. They create the world group and one group per axis of a
mesh of (N / 8) x 8, then run a reduction, a broadcast, a barrier and an all-gather.

Prints the total seconds, the maximum number of sockets of a rank, and CPU seconds of the store process.
Compares connecting all pairs at start with lazy connections (``TORCH_GLOO_LAZY_INIT``, which
`shardtrain` sets above 128 ranks).
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


def rank_main(rank: int, size: int, port: int, lazy: bool, sender: Any, release: Any) -> None:
    os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(lazy))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=300))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300)
    )
    init_device_mesh("cpu", (size // 8, 8), mesh_dim_names=("fsdp", "tp"))
    number = torch.tensor([rank])
    dist.all_reduce(number)
    assert int(number) == size * (size - 1) // 2
    dist.broadcast(number, 0)
    dist.all_gather(list(torch.zeros(size, 1, dtype=torch.int64)), torch.tensor([rank]))
    dist.barrier()
    sender.send((time.monotonic(), sockets()))
    release.wait()
    os._exit(0)


def serve(pipe: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def measure(size: int, lazy: bool) -> str:
    context = multiprocessing.get_context("fork")
    parent_end, child_end = context.Pipe()
    server = context.Process(target=serve, args=(child_end,), daemon=True)
    server.start()
    port = parent_end.recv()
    release = context.Event()
    begun = time.monotonic()
    pipes = []
    for rank in range(size):
        receiver, sender = context.Pipe(False)
        context.Process(
            target=rank_main, args=(rank, size, port, lazy, sender, release), daemon=True
        ).start()
        pipes.append(receiver)
    ends, counts = zip(*(pipe.recv() for pipe in pipes), strict=True)
    release.set()
    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
    store = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    parent_end.send(None)
    pairs = "as needed" if lazy else "all pairs"
    seconds = max(ends) - begun
    return f"{size} ranks, {pairs}: {seconds:.2f} s, {max(counts)} sockets, store {store:.2f} CPU s"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 64, 128])
    for size in parser.parse_args().ranks:
        for lazy in (False, True):
            print(measure(size, lazy), flush=True)


if __name__ == "__main__":
    main()
