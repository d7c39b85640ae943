"""This process's rank and device, and the process group that joins all ranks."""

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
from shardtrain.ops import accelerator, host_collectives
from shardtrain.utils import library_environment, variables
from shardtrain.utils.errors import ConfigError, PeerError, Problem
from shardtrain.utils.process import STORE


@dataclass(frozen=True)
class World:
    """The position of this process among all ranks."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    store: dist.Store | None = None
    """The store of the rendezvous. None if there was no rendezvous, as in tests."""


more_counters: set[Callable[[], int]] = set()
"""Functions that return the number of exchanges outside process groups, such as through shared memory."""


def collectives_begun() -> int:
    """Return the number of collectives that this process has started in all its groups.

    The watchdog uses it as a sign of progress. The call is cheap, and thread-safe even while groups are
    created and destroyed.
    """
    # Iterate over copies, because other threads may change the collections.
    total = sum(count() for count in list(more_counters))
    with contextlib.suppress(Exception):  # a group is being destroyed, or has no sequence numbers
        for group in list(dist.distributed_c10d._world.pg_map):
            with contextlib.suppress(RuntimeError):
                total += group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return total


def pick_device_type(wanted: str) -> str:
    """Return the device type for ``training.device``.

    Raises:
        ConfigError: the requested device does not exist.
    """
    available = accelerator.device_type()
    if wanted == "auto":
        # Fall back to the CPU if training does not support the accelerator that exists.
        return available if available in ACCELERATOR_TYPES else "cpu"
    if wanted not in ("cpu", available):
        rule = "finds no such device"
        if available:
            rule += f", and PyTorch finds {available} here"
        raise ConfigError(Problem("training.device", wanted, rule, 'use "cpu" or "auto"'))
    return wanted


@contextmanager
def join(
    comm: Comm, device: str, check: Callable[[dist.Store, int, int], None] | None = None
) -> Iterator[World]:
    """Context manager: join the process group that the launcher's environment variables describe.

    These are RANK, WORLD_SIZE and LOCAL_RANK, which torchrun and ``shardtrain train`` set. Without them the
    process is the only rank. The group is destroyed at the end of the block.

    Args:
        comm: timeouts.
        device: ``training.device``.
        check: called with the store, the rank and the number of ranks before the group is created. It may
            raise.

    Raises:
        PeerError: a process that does not know the run's secret has written to the store.
    """
    rank, size = variables.rank_and_size(os.environ)
    local_rank = variables.number(os.environ, "LOCAL_RANK", "0")
    device_type = pick_device_type(device)
    torch_device = accelerator.of_rank(device_type, local_rank)
    timeout = timedelta(seconds=comm.init_timeout_seconds)
    # The rendezvous below may set the variable STORE. If it was unset before, remove it at the end.
    has_store = STORE in os.environ
    backend = accelerator.collectives(device_type)
    # Gloo reads this variable when the group is created.
    if size > gloo_sockets.MOST_IN_A_FULL_MESH:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    try:
        with _meeting(size, timeout) as store:
            if check:
                check(store, rank, size)
            # Use the same prefix as PyTorch's own rendezvous, because keys must not collide with other users of
            # the store.
            group_store = dist.PrefixStore("default_pg", store)
            gloo_sockets.private(
                lambda: dist.init_process_group(
                    backend, store=group_store, rank=rank, world_size=size, timeout=timeout
                )
            )
    except ForgedError as error:
        raise PeerError(str(error)) from error
    host_collectives.set_timeout(comm.init_timeout_seconds)
    try:
        with library_environment.protected():
            yield World(rank, size, local_rank, torch_device, store)
    finally:
        dist.destroy_process_group()
        signed_store.release()
        if not has_store:
            # A later group of this process must use a new store.
            os.environ.pop(STORE, None)


@contextmanager
def _meeting(size: int, timeout: timedelta) -> Iterator[dist.Store]:
    """Yield the store in which the ranks find each other. Keep it open until all ranks have joined."""
    if size == 1:  # without a launcher there is no address or port
        yield dist.HashStore()
        return
    with store_of_attempt(os.environ, timeout) as store:
        if store is None:
            store = store_at_address(os.environ, timeout, size)
        store.set_timeout(timeout)
        yield store


def set_timeout(seconds: int) -> None:
    """Set the timeout of collectives on every process group of this rank. Called after the first step."""
    groups = dist.distributed_c10d
    for group in list(groups._world.pg_map):
        groups._set_pg_timeout(timedelta(seconds=seconds), group)
    host_collectives.set_timeout(seconds)


def gather_flags(flag: bool, device: torch.device) -> list[int]:
    """Return the list of ranks that pass ``flag=True``, on all ranks (a collective)."""
    # Each rank sets its own element, so the sum is a gather.
    flags = torch.zeros(dist.get_world_size(), dtype=torch.int32, device=device)
    flags[dist.get_rank()] = int(flag)
    host_collectives.all_reduce(flags)
    return [rank for rank, raised in enumerate(flags.tolist()) if raised]
