"""Start a dry run (``comm.mode="fake_backend"``): everything that is done before torch is imported."""

from __future__ import annotations

import os

from shardtrain import config
from shardtrain.config import Loaded
from shardtrain.launch import environment
from shardtrain.utils.heartbeat import heartbeat


def run(loaded: Loaded, nproc: int | None) -> int:
    """Check the configuration, build one of its ranks, and print a report. Return the exit status."""
    size = environment.choose_processes_here(loaded.config, nproc).count
    rank = environment.simulated_rank(os.environ, size)
    # This does not check devices and files, because the real run may be on other machines.
    notices = config.require_to_build(loaded, size)
    environment.set_process_defaults(os.environ, 1, environment.usable_cores(), alone=True)
    # import PyTorch only after the configuration has passed its checks
    with heartbeat("importing PyTorch"):
        from shardtrain.train import dry_run

    with heartbeat(f"building rank {rank} of {size}"):
        for line in dry_run.main(loaded, rank, size, notices):
            print(line, flush=True)
    return 0
