"""Who and where this process is: its rank, its device, and the process group that joins all ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from shardtrain.config.schema import Comm
from shardtrain.distributed.rendezvous import gloo_sockets, signed_store
from shardtrain.distributed.rendezvous.attempt_store import store_at_address, store_of_attempt
from shardtrain.distributed.rendezvous.signed_store import ForgedError
from shardtrain.facts.devices import ACCELERATOR_TYPES
from shardtrain.ops import accelerator
from shardtrain.utils import library_environment
from shardtrain.utils.errors import ConfigError, PeerError, Problem
from shardtrain.utils.process import STORE


@dataclass(frozen=True)
class World:
    """This rank among all ranks."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    store: dist.Store | None = None
    """Where the ranks met; None where they met otherwise, as in tests."""


more_counters: set[Callable[[], int]] = set()
"""Functions that count exchanges between ranks outside of process groups, such as those by shared memory."""


def collectives_begun() -> int:
    """How many collectives this process has begun, of all its groups: one that begins more of them moves.

    Cheap, and may be asked by any thread, while groups come and go too.
    """
    total = sum(count() for count in list(more_counters))
    with contextlib.suppress(Exception):  # a group that is being destroyed, or has no numbers
        for group in list(dist.distributed_c10d._world.pg_map):
            with contextlib.suppress(RuntimeError):
                total += group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return total


def pick_device_type(wanted: str) -> str:
    """The type of device for ``training.device``; raises ConfigError where the one asked for is missing."""
    found = accelerator.found()
    if wanted == "auto":
        return found if found in ACCELERATOR_TYPES else "cpu"
    if wanted not in ("cpu", found):
        rule = f"finds no such device{f', and PyTorch finds {found} here' if found else ''}"
        raise ConfigError(Problem("training.device", wanted, rule, 'use "cpu" or "auto"'))
    return wanted


@contextmanager
def join(comm: Comm, device: str, check: Callable[[dist.Store, int, int], None] | None = None) -> Iterator[World]:
    """Join the process group that the launcher's environment describes, or be a world of one; leave it at the end.

    Reads RANK, WORLD_SIZE and LOCAL_RANK, which torchrun and ``shardtrain train`` set. ``check`` is called with the
    store, the rank and the number of ranks before the group is made, and may refuse.

    Raises:
        PeerError: somebody who does not know the run's secret has written where the nodes meet.
    """
    rank = int(os.environ.get("RANK", "0"))
    size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device_type = pick_device_type(device)
    torch_device = accelerator.of_rank(device_type, local_rank)
    timeout = timedelta(seconds=comm.init_timeout_seconds)
    given = STORE in os.environ  # else the rendezvous sets it, for this group alone
    backend = accelerator.collectives(device_type)
    # read by gloo when the group is made
    if size > gloo_sockets.MOST_IN_A_FULL_MESH:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    try:
        with _meeting(size, timeout) as store:
            if check:
                check(store, rank, size)
            # a prefix of its own, as PyTorch's rendezvous gives it: other users of the store cannot meet its keys
            group_store = dist.PrefixStore("default_pg", store)
            gloo_sockets.private(
                lambda: dist.init_process_group(backend, store=group_store, rank=rank, world_size=size, timeout=timeout)
            )
    except ForgedError as error:
        raise PeerError(str(error)) from error
    try:
        with library_environment.protected():
            yield World(rank, size, local_rank, torch_device, store)
    finally:
        dist.destroy_process_group()
        signed_store.release()
        if not given:  # another group of this process meets elsewhere
            os.environ.pop(STORE, None)


@contextmanager
def _meeting(size: int, timeout: timedelta) -> Iterator[dist.Store]:
    """The store in which the ranks find each other; stay until all have."""
    if size == 1:  # no launcher, so no address to meet at, and no port
        yield dist.HashStore()
        return
    with store_of_attempt(os.environ, timeout) as own:
        store = own
        if store is None:
            store = store_at_address(os.environ, timeout, size)
        store.set_timeout(timeout)
        yield store


def set_timeout(seconds: int) -> None:
    """Set the limit of collectives on every process group of this rank; called once the first step is done."""
    groups = dist.distributed_c10d
    for group in list(groups._world.pg_map):
        groups._set_pg_timeout(timedelta(seconds=seconds), group)


def gather_flags(flag: bool, device: torch.device) -> list[int]:
    """Ranks that raised a flag, the same list on all ranks (a collective)."""
    flags = torch.zeros(dist.get_world_size(), dtype=torch.int32, device=device)
    flags[dist.get_rank()] = int(flag)
    dist.all_reduce(flags)
    return [rank for rank, raised in enumerate(flags.tolist()) if raised]
