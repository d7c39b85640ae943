"""A dry run: one process builds one rank of any number of ranks, and nothing is trained."""

from __future__ import annotations

import os

from shardtrain import config
from shardtrain.config import Loaded
from shardtrain.launch import environment
from shardtrain.utils.heartbeat import heartbeat


def run(loaded: Loaded, nproc: int | None) -> int:
    """Check the configuration for any number of ranks, and build one rank's share of it without memory."""
    size = environment.choose_processes_here(loaded.config, nproc).count
    rank = environment.simulated_rank(os.environ, size)
    notices = config.require_to_build(loaded, size)  # of this machine's devices and files nothing is asked
    environment.set_process_defaults(os.environ, 1, environment.usable_cores(), alone=True)
    with heartbeat("importing PyTorch"):  # once the configuration has been found to work
        from shardtrain.train import dry_run

    with heartbeat(f"building rank {rank} of {size}"):
        for line in dry_run.main(loaded, rank, size, notices):
            print(line, flush=True)
    return 0
