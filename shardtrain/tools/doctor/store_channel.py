"""Communication between ranks of the doctor.

It uses only the store, which still works if collectives hang.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardtrain.distributed.rendezvous.attempt_store import store_at_address, store_of_attempt
from shardtrain.distributed.rendezvous.signed_store import ForgedError
from shardtrain.tools.doctor.result import first_few
from shardtrain.utils.errors import ConfigError, PeerError, Problem
from shardtrain.utils.process import meeting_folder
from shardtrain.utils.variables import is_whole_number

LOOK_SECONDS = 0.25
"""Interval at which a waiting rank checks if another rank has given up."""
LOOKS_PER_SECOND = 1000
"""Maximum number of these checks per second, over all ranks. Many ranks check less often."""


@contextlib.contextmanager
def open_store(rank: int, size: int, limit_seconds: float) -> Iterator[dist.Store]:
    """Open the store of this job. No rank waits for another here, so later steps can name absent ranks.

    Raises:
        PeerError: the launcher's address cannot be reached within ``limit_seconds``, the connection is lost,
            or a client without the run's secret wrote to the store.
        ConfigError: the launcher set no address.
    """
    if size == 1:
        yield dist.HashStore()
        return
    timeout = timedelta(seconds=limit_seconds)
    address = os.environ.get("MASTER_ADDR", "")
    port = os.environ.get("MASTER_PORT", "")
    has_address = address and is_whole_number(port)
    if not has_address and not meeting_folder(os.environ):
        raise ConfigError(
            Problem(
                "MASTER_ADDR:MASTER_PORT",
                f"{address}:{port}",
                rule="is not an address",
                fix="start it with torchrun or srun, or without RANK and WORLD_SIZE",
            )
        )
    try:
        # Use the store of shardtrain's launcher if it started this rank. Otherwise use the address of
        # torchrun or srun, where rank 0 serves the store unless torchrun's agent does.
        with store_of_attempt(os.environ, timeout) as store_of_launcher:
            store = store_of_launcher
            if store is None:
                store = store_at_address(os.environ, timeout)
            store.set_timeout(timeout)
            yield store
    except ForgedError as error:
        raise PeerError(str(error)) from error
    except dist.DistError as error:
        # The other lines of the message are a C++ stack trace.
        lines = str(error).splitlines() or [type(error).__name__]
        text = lines[0].rstrip(".")
        raise PeerError(
            f"rank {rank} cannot reach MASTER_ADDR={address} MASTER_PORT={port}: {text}; "
            "check that rank 0 runs, that the name resolves, and that no firewall blocks the port"
        ) from error


EXTRA_SECONDS = 5.0
"""Time to wait for other ranks, in addition to the limits of their checks."""
AGAIN_SECONDS = 1.0
"""Time to wait for other ranks after a first wait has timed out."""


class StoreChannel:
    """One rank's connection to the others.

    Attributes:
        place: Number of steps that this rank has begun in this area. All ranks begin the same steps in the
            same order, so a lower number is further behind.
        timed_out: True if this rank has waited in vain for other ranks.
        deadline: Monotonic time at which the current step exceeds its limit.
    """

    def __init__(self, store: Any, rank: int, size: int, limit_seconds: float) -> None:
        # Use a separate connection, because a wait in the process group's store would block this channel.
        self._store = dist.PrefixStore("doctor", store.clone())
        self.rank = rank
        self.size = size
        self.limit_seconds = limit_seconds
        self.area = self.where = "the start"
        self.place = 0
        self.timed_out = False
        self.deadline = time.monotonic() + limit_seconds

    @property
    def patience_seconds(self) -> float:
        """Time to wait for other ranks. They may use up the limits of two checks before they arrive."""
        if self.timed_out:
            return AGAIN_SECONDS
        return 2 * self.limit_seconds + EXTRA_SECONDS

    def begin(self, area: str) -> StoreChannel:
        """Begin an area. Return a separate channel for it, which an abandoned check may keep."""
        line = copy.copy(self)
        line.area = area
        line.place = 0
        line.mark(area)
        return line

    def cancel(self) -> None:
        """Announce that this rank skips further meetings of the area, so other ranks do not wait for it."""
        self._store.set(f"gave-up-{self.area}", json.dumps([self.rank, self.where]))

    def mark(self, where: str) -> None:
        """Record that this rank begins the step ``where``, and restart the time limit."""
        self.where = where
        self.deadline = time.monotonic() + self.limit_seconds
        self.place += 1
        self._store.set(f"at-{self.rank}", json.dumps(where))

    def meet(self, name: str) -> None:
        """Wait for all ranks. Raise PeerError with the absent ranks after ``patience_seconds``."""
        self.mark(f"waiting for all ranks before {name}")
        limit_seconds = self.patience_seconds
        self.deadline = time.monotonic() + limit_seconds + 1

        # The last rank sets one key that all ranks poll. A key per rank identifies absent ranks.
        self._store.set(f"meet-{name}-{self.rank}", "1")
        if self._store.add(f"meet-{name}", 1) == self.size:
            self._store.set(f"met-{name}", "1")
        given_up = f"gave-up-{self.area}"
        if self._comes(f"met-{name}", limit_seconds, unless=given_up):
            self.mark(name)
            return

        # Name the rank at fault: one that has given up, or else those that have not arrived.
        if self._store.check([given_up]):
            rank, where = json.loads(self._store.get(given_up))
            raise PeerError(f"rank {rank} did not get past {where}")
        self.timed_out = True
        absent = []
        for rank in range(self.size):
            if not self._store.check([f"meet-{name}-{rank}"]):
                absent.append(str(rank))
        raise PeerError(f"rank {first_few(absent, 8)} has not arrived")

    def send(self, key: str, value: Any) -> None:
        """Store a value for other ranks."""
        self._store.set(key, json.dumps(value))

    def receive_all(self, keys: Sequence[str]) -> list[Any] | None:
        """Return the values of several keys with two requests, or None if one of them is not set."""
        if not self._store.check(list(keys)):
            return None
        return [json.loads(value) for value in self._store.multi_get(list(keys))]

    def receive(self, key: str, limit_seconds: float = 0.0) -> Any:
        """Return the value that a rank stores within the time limit, or None."""
        if not self._comes(key, limit_seconds):
            return None
        return json.loads(self._store.get(key))

    def _comes(self, key: str, limit_seconds: float, unless: str = "") -> bool:
        """Wait until the key is set. Return False after the time limit, or as soon as the key ``unless`` is set."""
        end = time.monotonic() + limit_seconds
        interval = max(LOOK_SECONDS, self.size / LOOKS_PER_SECOND)
        while not self._store.check([key]):
            remaining = end - time.monotonic()
            if remaining <= 0 or (unless and self._store.check([unless])):
                return False
            # The store answers when the key is set, so a waiting rank sends no requests.
            try:
                self._store.wait([key], timedelta(seconds=min(interval, remaining)))
            except dist.DistNetworkError:
                raise
            except RuntimeError:
                # A timeout: DistStoreError of most stores, RuntimeError of a FileStore.
                continue
        return True
