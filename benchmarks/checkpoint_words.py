"""Memory that a rank needs to receive a manifest from rank 0, by number of ranks.

    python benchmarks/checkpoint_words.py [--mebibytes 36] [--ranks 2 4 8]

Forks real ranks with gloo. Each prints the growth of its peak resident memory in MiB. An earlier
design grew with the number of ranks, because each rank gathered one text per rank.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile

import torch.distributed as dist
import torch.multiprocessing

from shardtrain.checkpoint import collectives


def rank_main(rank: int, size: int, folder: str, mebibytes: int) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(os.path.join(folder, "store"), size),
        rank=rank,
        world_size=size,
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    text = collectives.broadcast_json("m" * (mebibytes * 2**20) if rank == 0 else None)
    assert len(text) == mebibytes * 2**20
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if rank in (0, size - 1):
        print(
            f"{size} ranks, rank {rank}: a text of {mebibytes} MiB adds {grown:.0f} MiB of memory",
            flush=True,
        )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mebibytes", type=int, default=36)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    options = parser.parse_args()
    for size in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.start_processes(
                rank_main, (size, folder, options.mebibytes), nprocs=size, start_method="fork"
            )


if __name__ == "__main__":
    main()
