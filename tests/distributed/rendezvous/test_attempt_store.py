"""Every attempt of a job uses a separate store, unaffected by keys of earlier attempts in the launcher's store."""

from __future__ import annotations

import errno
import socket
import threading
from datetime import timedelta

import patience
import pytest
import torch.distributed as dist
from ports import free_port

from shardtrain.distributed.rendezvous import attempt_store
from shardtrain.utils.errors import ConfigError

TIMEOUT = timedelta(seconds=60)


@pytest.fixture
def shared():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)


def environment(store, rank):
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": str(rank)}
    return {**names, "TORCHELASTIC_USE_AGENT_STORE": "True"}


def attempt(store, number, size=3):
    """Run the ranks of an attempt. Each writes ``number``. Return the numbers that each rank reads."""
    numbers_read = {}
    joined = threading.Barrier(size)

    def rank_main(rank):
        with attempt_store.store_of_attempt(environment(store, rank), TIMEOUT) as store_of_rank:
            store_of_rank.set(f"address/{rank}", str(number))
            numbers_read[rank] = [int(store_of_rank.get(f"address/{peer}")) for peer in range(size)]
            joined.wait(patience.seconds(60))

    threads = [
        threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(size)
    ]
    for thread in reversed(threads):  # rank 0 starts last
        thread.start()
    for thread in threads:
        thread.join(patience.seconds(120))
    return numbers_read


def test_no_rank_reads_values_of_an_earlier_attempt(shared):
    for number, size in enumerate((3, 2, 4)):
        assert attempt(shared, number, size) == {rank: [number] * size for rank in range(size)}


def test_ranks_killed_during_rendezvous_do_not_block_others(shared):
    shared.add("shardtrain/asked", 1)  # a rank that took a number and was killed
    shared.set(
        f"shardtrain/asked/{shared.add('shardtrain/asked', 1)}",
        "a rank that never reads its answer",
    )

    assert attempt(shared, 7) == {rank: [7] * 3 for rank in range(3)}

    shared.add("shardtrain/asked", 1)
    assert attempt(shared, 8) == {rank: [8] * 3 for rank in range(3)}


def test_rendezvous_times_out_without_rank_0(shared):
    store = attempt_store.store_of_attempt(environment(shared, 1), timedelta(milliseconds=200))
    with pytest.raises(dist.DistError), store:
        pass


@pytest.mark.parametrize(
    "change", [{"TORCHELASTIC_USE_AGENT_STORE": "False"}, {"SHARDTRAIN_JOB": "a:1"}]
)
def test_launcher_with_a_store_per_attempt_needs_no_other(shared, change):
    with attempt_store.store_of_attempt({**environment(shared, 1), **change}, TIMEOUT) as store:
        assert store is None


# error of listen() -> type and message of the store's error
LISTEN_ERRORS = {
    "EACCES": (
        PermissionError(errno.EACCES, "Permission denied"),
        ConfigError,
        "MASTER_PORT=1.*Permission denied",
    ),
    "EMFILE": (OSError(errno.EMFILE, "Too many open files"), OSError, "Too many open files"),
    "a name that does not resolve": (
        socket.gaierror(-2, "Name or service not known"),
        ConfigError,
        "MASTER_ADDR=.127.0.0.1. does not resolve on the host of rank 0: Name or service not known",
    ),
}


@pytest.mark.parametrize("name", LISTEN_ERRORS)
def test_error_of_listen_does_not_open_the_store_on_all_addresses(name, monkeypatch):
    error, kind, message = LISTEN_ERRORS[name]

    def fail(*_):
        raise error

    monkeypatch.setattr(attempt_store, "rendezvous_listener", fail)
    served = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "0"}
    with pytest.raises(kind, match=message):
        attempt_store.store_at_address(served, timedelta(milliseconds=100))


def test_store_that_this_process_already_serves_is_shared():
    first = attempt_store.store_at_address(
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": (port := str(free_port())), "RANK": "0"},
        TIMEOUT,
    )
    second = attempt_store.store_at_address(
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0"}, TIMEOUT
    )
    first.set("key", "value")

    assert second.get("key") == b"value"
