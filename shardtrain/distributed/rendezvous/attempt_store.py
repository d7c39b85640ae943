"""Create a separate store for each attempt of a run, because some launchers use one store for all attempts.

Ranks find each other by keys in a store. torchrun, for example, keeps one store for all restarts. A restarted
rank could therefore read the address of a dead rank, try to connect, and fail or wait (PyTorch issue
135712). The restart count does not identify an attempt: each agent counts separately, and a node that
joined later has a lower count. Instead, rank 0 draws a random name for the attempt. Every other rank
writes a random token to request the name, and rank 0 writes its reply under that token.

The launcher's store has no password. If all ranks are on this machine, or are tasks of a Slurm step
on one node, they use a private folder instead. Ranks on several nodes sign their values if they share a
secret.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from shardtrain.distributed.rendezvous import private_store
from shardtrain.distributed.rendezvous.private_store import FolderStore
from shardtrain.distributed.rendezvous.signed_store import ForgedError, signed
from shardtrain.utils import variables
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.listening import rendezvous_listener
from shardtrain.utils.process import STORE

POLL_SECONDS = 0.02
_ASKED = "shardtrain/asked"
_MOST_AT_ONCE = 65_536


@contextmanager
def store_of_attempt(
    environment: MutableMapping[str, str], timeout: timedelta
) -> Iterator[dist.Store | None]:
    """Context manager that yields the store for joining the process group. None means PyTorch's default.

    Leave it after joining. If attempts share the launcher's store and all ranks are on this machine, the
    ranks use a private folder instead, and this sets its path in ``environment``.

    Raises:
        StorageError: the private folder cannot be used.
        dist.DistError: the launcher's store cannot be reached, or rank 0 does not answer within ``timeout``.
    """
    # If the variable is set, this package's launcher has created a new folder for this attempt.
    if folder := private_store.folder_of(environment):
        yield private_store.group_store(folder)
        return
    place = private_store.folder_of_step(environment)
    if place is None:
        if (
            environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            or "SHARDTRAIN_JOB" in environment
        ):
            yield None
            return
        place = private_store.folder_of_launcher(environment)
    # Several attempts share this store. Rank 0 creates a separate store for the current attempt.
    shared = _connect(environment, timeout, place)
    done = threading.Event()

    def store(name: str) -> dist.Store:
        if place is None:
            assert isinstance(shared, dist.Store)
            # Signatures cover the key, which contains the attempt's name.
            return dist.PrefixStore(f"shardtrain/{name}", shared)
        environment[STORE] = str(place / name)
        loopback = "lo" if sys.platform == "linux" else "lo0"
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
        return private_store.group_store(place / name)

    if environment["RANK"] != "0":
        # Request the name of this attempt from rank 0. The random token excludes replies of earlier attempts.
        token = secrets.token_hex(8)
        shared.set(f"{_ASKED}/{shared.add(_ASKED, 1)}", token)
        shared.wait([f"{_ASKED}/answer/{token}"], timeout)
        yield store(shared.get(f"{_ASKED}/answer/{token}").decode())
        return
    name = secrets.token_hex(8)
    if place:
        private_store.sweep(place)
        (place / name).mkdir(mode=0o700)
    # The thread needs its own connection, because a wait blocks all users of a connection.
    thread = threading.Thread(
        target=_answer, args=(_connect(environment, timeout, place), name, done), daemon=True
    )
    thread.start()
    try:
        yield store(name)
    finally:
        done.set()
        thread.join()


def store_at_address(
    environment: Mapping[str, str], timeout: timedelta, size: int | None = None
) -> dist.Store:
    """Return the store at MASTER_ADDR and MASTER_PORT. Rank 0 serves it, unless its launcher does.

    Args:
        size: number of ranks that must connect before rank 0 returns. None: rank 0 does not wait.

    Raises:
        ConfigError: this process cannot listen at that address.
        dist.DistError: the store cannot be served or reached.
    """
    address = environment["MASTER_ADDR"]
    port = variables.number(environment, "MASTER_PORT", "")
    serves = (
        environment["RANK"] == "0" and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    )
    listener = _listener(address, port, timeout) if serves else None
    store = dist.TCPStore(
        host_name=address,
        port=port,
        world_size=size,
        is_master=serves,
        timeout=timeout,
        wait_for_workers=size is not None,
        multi_tenant=True,
        master_listen_fd=listener,
    )
    # Each attempt has its own port, so the port identifies the attempt in signatures.
    return signed(store, environment, str(port))


def _listener(address: str, port: int, timeout: timedelta) -> int | None:
    """Return the descriptor of a socket on which rank 0 serves the store.

    None if the port is in use. PyTorch then reuses the store that this process already serves there, or
    fails with the same error. All other errors are raised, because PyTorch would react to None by listening
    on all addresses of this machine.

    Raises:
        ConfigError: ``address`` does not resolve within ``timeout``, or this user may not use the port.
    """
    end = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            return rendezvous_listener(address, port).detach()
        except socket.gaierror as error:
            # A pod's own host name resolves only some seconds after its start.
            if time.monotonic() > end:
                rule = f"does not resolve on the host of rank 0: {error.strerror}"
                fix = "set it to a name or address of that host"
                raise ConfigError(
                    Problem("MASTER_ADDR", address, rule, fix, "environment")
                ) from None
            time.sleep(POLL_SECONDS)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            if error.errno != errno.EACCES:
                raise
            rule = f"cannot be served from this host: {os.strerror(error.errno)}"
            fix = "choose another port"
            raise ConfigError(Problem("MASTER_PORT", port, rule, fix, "environment")) from None


def _connect(
    environment: Mapping[str, str], timeout: timedelta, place: Path | None
) -> dist.Store | FolderStore:
    if place:
        return FolderStore(place)
    address = environment["MASTER_ADDR"]
    port = variables.number(environment, "MASTER_PORT", "")
    return signed(dist.TCPStore(address, port, is_master=False, timeout=timeout), environment, "")


def _answer(store: dist.Store | FolderStore, name: str, done: threading.Event) -> None:
    """Reply to every request with the attempt's name, until ``done`` is set.

    The store may still contain requests of earlier attempts. The replies to these have no effect.
    """
    seen = 0
    open_numbers = set[int]()
    while not done.wait(POLL_SECONDS):
        try:
            # Any process may increase the counter. Limit the requests per round, because each needs memory.
            count = min(store.add(_ASKED, 0), seen + _MOST_AT_ONCE)
            open_numbers.update(range(seen + 1, count + 1))
            seen = count
            # Do not wait for a request: a rank may have been killed after it took a number.
            with_request = [
                number for number in open_numbers if store.check([f"{_ASKED}/{number}"])
            ]
            for number in with_request:
                open_numbers.discard(number)
                # Ignore requests that are not signed.
                with contextlib.suppress(ForgedError):
                    request = store.get(f"{_ASKED}/{number}").decode()
                    store.set(f"{_ASKED}/answer/{request}", name)
        except dist.DistError:
            # The launcher's store is gone. Just stop: joining the group fails with a better message.
            return
