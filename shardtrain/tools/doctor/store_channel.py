"""How ranks of the doctor talk: through the store alone, which answers also where collectives hang."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardtrain.distributed.rendezvous.attempt_store import store_at_address, store_of_attempt
from shardtrain.distributed.rendezvous.signed_store import ForgedError
from shardtrain.utils.errors import ConfigError, PeerError, Problem
from shardtrain.utils.process import meeting_folder

FIRST_POLL_SECONDS = 0.002
"""Polls begin dense, for ranks that come together."""
LAST_POLL_SECONDS = 0.25
"""They get rare, since thousands of ranks ask one server."""


@contextlib.contextmanager
def open_store(rank: int, size: int, limit_seconds: float) -> Iterator[dist.Store]:
    """The store in which the ranks of this job meet; no rank waits for another here, so that absent ones are named.

    Raises:
        PeerError: the address that the launcher gave cannot be reached within ``limit_seconds``, or no longer, or
            somebody who does not know the run's secret has written there.
        ConfigError: the launcher gave none.
    """
    if size == 1:
        yield dist.HashStore()
        return
    timeout = timedelta(seconds=limit_seconds)
    address = os.environ.get("MASTER_ADDR", "")
    port = os.environ.get("MASTER_PORT", "")
    if not meeting_folder(os.environ) and (not address or not port.isdecimal()):
        fix = "start it with torchrun or srun, or without RANK and WORLD_SIZE"
        raise ConfigError(Problem("MASTER_ADDR:MASTER_PORT", f"{address}:{port}", "is not a place to meet", fix))
    try:
        # The store of our own launcher, if it started this rank; else one at the address that torchrun or srun gave,
        # which the first rank serves unless torchrun's agent does.
        with store_of_attempt(os.environ, timeout) as own:
            store = own
            if store is None:
                store = store_at_address(os.environ, timeout)
            store.set_timeout(timeout)
            yield store
    except ForgedError as error:
        raise PeerError(str(error)) from error
    except dist.DistError as error:
        text = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise PeerError(
            f"rank {rank} does not reach MASTER_ADDR={address} MASTER_PORT={port}: {text}; "
            "look whether rank 0 runs, whether the name resolves, and whether a firewall is in between"
        ) from error


EXTRA_SECONDS = 5.0
"""How long to wait for other ranks beyond what their checks may take."""
AGAIN_SECONDS = 1.0
"""How long to wait once a first wait has had no answer."""


class StoreChannel:
    """One rank's connection to the others."""

    def __init__(self, store: Any, rank: int, size: int, limit_seconds: float) -> None:
        # a connection of its own: a wait in the process group's store would hold this one too
        self._store = dist.PrefixStore("doctor", store.clone())
        self.rank = rank
        self.size = size
        self.limit_seconds = limit_seconds
        self.area = self.where = "the start"
        self.place = 0
        """Marks in this area: ranks come to the same places in the same order, so that less is behind."""
        self.timed_out = False
        """Whether this rank has waited for others that did not come."""
        self.deadline = time.monotonic() + limit_seconds
        """When what this rank does now has taken too long."""

    @property
    def patience_seconds(self) -> float:
        """How long to wait for other ranks, which may use up the limit of two checks before they come."""
        return AGAIN_SECONDS if self.timed_out else 2 * self.limit_seconds + EXTRA_SECONDS

    def begin(self, area: str) -> StoreChannel:
        """Say that this rank begins an area; gives the line for it, which a check that is left behind may keep."""
        line = copy.copy(self)
        line.area = area
        line.place = 0
        line.mark(area)
        return line

    def cancel(self) -> None:
        """Say that this rank will come to no more meetings of the area, so that others need not wait for it."""
        self._store.set(f"gave-up-{self.area}", json.dumps([self.rank, self.where]))

    def mark(self, where: str) -> None:
        """Say that this rank has come to ``where``, which may take ``limit_seconds`` from now."""
        self.where = where
        self.deadline = time.monotonic() + self.limit_seconds
        self.place += 1
        self._store.set(f"at-{self.rank}", json.dumps(where))

    def meet(self, name: str) -> None:
        """Wait until all ranks are here; raises PeerError that names who is not when patience ends."""
        self.mark(f"waiting for all ranks before {name}")
        limit_seconds = self.patience_seconds
        self.deadline = time.monotonic() + limit_seconds + 1
        # The last to come opens the door for all, by one key that they ask for; a key of each rank says who is absent.
        self._store.set(f"meet-{name}-{self.rank}", "1")
        if self._store.add(f"meet-{name}", 1) == self.size:
            self._store.set(f"met-{name}", "1")
        if not self._comes(f"met-{name}", limit_seconds, unless=f"gave-up-{self.area}"):
            if self._store.check([f"gave-up-{self.area}"]):
                rank, where = json.loads(self._store.get(f"gave-up-{self.area}"))
                raise PeerError(f"rank {rank} did not come past {where}")
            self.timed_out = True
            absent = [rank for rank in range(self.size) if not self._store.check([f"meet-{name}-{rank}"])]
            ranks = ", ".join(map(str, absent[:8])) + ("" if len(absent) < 9 else f" and {len(absent) - 8} more")
            raise PeerError(f"rank {ranks} has not come")
        self.mark(name)

    def send(self, key: str, value: Any) -> None:
        """Leave a value for the other ranks."""
        self._store.set(key, json.dumps(value))

    def receive(self, key: str, limit_seconds: float = 0.0) -> Any:
        """A value that a rank leaves within the limit, or None."""
        return json.loads(self._store.get(key)) if self._comes(key, limit_seconds) else None

    def _comes(self, key: str, limit_seconds: float, unless: str = "") -> bool:
        end = time.monotonic() + limit_seconds
        pause = FIRST_POLL_SECONDS
        while not self._store.check([key]):
            if time.monotonic() >= end or (unless and self._store.check([unless])):
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, LAST_POLL_SECONDS)
        return True
