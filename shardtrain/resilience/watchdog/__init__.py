"""A watchdog beside the process group: hangs are found, and the rank and phase that did not arrive are named.

Each rank writes a heartbeat to the run's store every two seconds, and a few ranks read those of all.
``hang_detector`` holds the rules for hangs, ``stragglers`` those for slow ranks and for ranks that diverged,
``watchdog`` the threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from shardtrain.config.schema import Config
from shardtrain.distributed import private_store
from shardtrain.distributed.private_store import FolderStore
from shardtrain.distributed.process_group import World
from shardtrain.resilience.progress import Phases
from shardtrain.resilience.watchdog.watchdog import Watchdog

__all__ = ["Watchdog", "beating"]


@contextmanager
def beating(config: Config, world: World, phases: Phases) -> Iterator[None]:
    """Let this rank's watchdog beat until the block ends; a process that hangs in it is ended, and the run too."""
    if world.store is None or not (config.comm.hang_timeout_seconds or config.comm.straggler_window_steps):
        yield
        return
    own: Any = world.store
    folder = private_store.folder_of(os.environ)
    # a connection of its own: a wait in the process group's would hold the heartbeat too
    store: Any = FolderStore(folder / "heartbeat") if folder else dist.PrefixStore("heartbeat", own.clone())
    rank_watchdog = Watchdog(store, world.rank, world.size, config, phases, world.device.type)
    rank_watchdog.start()
    try:
        yield
    finally:
        rank_watchdog.close()
