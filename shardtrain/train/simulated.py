"""Start a dry run (``comm.mode="fake_backend"``): the torch-free part, before ``dry_run`` is imported."""

from __future__ import annotations

import os

from shardtrain import config
from shardtrain.config import Loaded
from shardtrain.launch import environment
from shardtrain.utils.heartbeat import heartbeat


def run(loaded: Loaded, nproc: int | None) -> int:
    """Check the configuration for any number of ranks, and print the report of one rank.

    Return the exit status.
    """
    size = environment.choose_processes_here(loaded.config, nproc).count
    rank = environment.simulated_rank(os.environ, size)
    # does not check devices and files of this machine
    notices = config.require_to_build(loaded, size)
    environment.set_process_defaults(os.environ, 1, environment.usable_cores(), alone=True)
    # import PyTorch only after the configuration has passed its checks
    with heartbeat("importing PyTorch"):
        from shardtrain.train import dry_run

    with heartbeat(f"building rank {rank} of {size}"):
        for line in dry_run.main(loaded, rank, size, notices):
            print(line, flush=True)
    return 0
