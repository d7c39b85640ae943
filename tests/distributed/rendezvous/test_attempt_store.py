"""Each attempt of a job meets in a store of its own, whatever earlier attempts left in the launcher's."""

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
    """What each rank reads from all ranks of its attempt: the number that the attempt has written."""
    found, joined = {}, threading.Barrier(size)

    def rank_main(rank):
        with attempt_store.store_of_attempt(environment(store, rank), TIMEOUT) as own:
            own.set(f"address/{rank}", str(number))
            found[rank] = [int(own.get(f"address/{other}")) for other in range(size)]
            joined.wait(patience.seconds(60))

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in reversed(threads):  # rank 0 comes last
        thread.start()
    for thread in threads:
        thread.join(patience.seconds(120))
    return found


def test_no_rank_reads_what_an_earlier_attempt_left(shared):
    for number, size in enumerate((3, 2, 4)):
        assert attempt(shared, number, size) == {rank: [number] * size for rank in range(size)}


def test_ranks_that_were_killed_while_they_asked_keep_nobody_from_meeting(shared):
    shared.add("shardtrain/asked", 1)  # took a number, and was killed
    shared.set(f"shardtrain/asked/{shared.add('shardtrain/asked', 1)}", "and one that will never read its answer")
    assert attempt(shared, 7) == {rank: [7] * 3 for rank in range(3)}
    shared.add("shardtrain/asked", 1)
    assert attempt(shared, 8) == {rank: [8] * 3 for rank in range(3)}


def test_a_rank_whose_first_rank_never_comes_says_so_in_time(shared):
    asked = attempt_store.store_of_attempt(environment(shared, 1), timedelta(milliseconds=200))
    with pytest.raises(dist.DistError), asked:
        pass


@pytest.mark.parametrize("change", [{"TORCHELASTIC_USE_AGENT_STORE": "False"}, {"SHARDTRAIN_JOB": "a:1"}])
def test_a_launcher_with_a_store_for_each_attempt_needs_no_other(shared, change):
    with attempt_store.store_of_attempt({**environment(shared, 1), **change}, TIMEOUT) as own:
        assert own is None


# error of listening -> type and words of the error of the store; 127.0.0.1 is never listened on by PyTorch itself
LISTEN_ERRORS = {
    "EACCES": (PermissionError(errno.EACCES, "Permission denied"), ConfigError, "MASTER_PORT=1.*Permission denied"),
    "EMFILE": (OSError(errno.EMFILE, "Too many open files"), OSError, "Too many open files"),
    "a name that does not resolve": (
        socket.gaierror(-2, "Name or service not known"),
        ConfigError,
        "MASTER_ADDR=.127.0.0.1. does not resolve on the host of rank 0: Name or service not known",
    ),
}


@pytest.mark.parametrize("name", LISTEN_ERRORS)
def test_an_error_of_listening_does_not_open_the_store_on_all_addresses(name, monkeypatch):
    error, kind, words = LISTEN_ERRORS[name]

    def fail(*_):
        raise error

    monkeypatch.setattr(attempt_store, "rendezvous_listener", fail)
    served = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "0"}
    with pytest.raises(kind, match=words):
        attempt_store.store_at_address(served, timedelta(milliseconds=100))


def test_a_store_that_this_process_serves_already_is_shared():
    first = attempt_store.store_at_address(
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": (port := str(free_port())), "RANK": "0"}, TIMEOUT
    )
    second = attempt_store.store_at_address({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0"}, TIMEOUT)
    first.set("key", "value")
    assert second.get("key") == b"value"
