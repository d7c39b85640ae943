"""One rank of each node sends the heartbeats of the node. All are received, even if a rank stops."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardtrain.resilience.watchdog import exchange
from shardtrain.resilience.watchdog.exchange import HeartbeatExchange
from shardtrain.resilience.watchdog.rank_heartbeat import Heartbeat
from shardtrain.utils.process import STORE

BEAT = 0.02


class Counted:
    """A store that counts requests by rank and method."""

    def __init__(self, store: dist.Store, calls: Counter[tuple[int, str]], rank: int) -> None:
        self._store = store
        self._calls = calls
        self._rank = rank

    def __getattr__(self, name: str) -> Any:
        self._calls[self._rank, name] += 1
        return getattr(self._store, name)


class Nodes:
    """Two nodes with three ranks each, simulated in this process."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = dist.HashStore()
        self.calls = Counter[tuple[int, str]]()
        self.ranks = [
            HeartbeatExchange(Counted(self.store, self.calls, rank), rank, 6, BEAT)
            for rank in range(6)
        ]
        self.beats = [0] * 6
        for rank, exchange_of_rank in enumerate(self.ranks):
            runtime = tmp_path / f"node{rank // 3}"
            runtime.mkdir(exist_ok=True)
            monkeypatch.setattr(socket, "gethostname", lambda node=rank // 3: f"node{node}")
            exchange_of_rank.meet(
                {
                    "LOCAL_RANK": str(rank % 3),
                    "LOCAL_WORLD_SIZE": "3",
                    "XDG_RUNTIME_DIR": str(runtime),
                }
            )
        self.calls.clear()

    def beat(self, *ranks: int, has_left: bool = False) -> None:
        for rank in ranks:
            self.beats[rank] += 1
            self.ranks[rank].say(Heartbeat(self.beats[rank], f"node{rank // 3}", has_left=has_left))

    def received(self) -> dict[int, int]:
        return {rank: sign.beat for rank, sign in self.ranks[0].receive().items()}


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    return Nodes(tmp_path, monkeypatch)


def test_all_ranks_are_received_and_one_rank_per_node_sends(nodes: Nodes) -> None:
    for _ in range(5):
        nodes.beat(2, 1, 5, 4, 0, 3)
    assert nodes.received() == dict.fromkeys(range(6), 5)

    for _ in range(3):
        time.sleep(BEAT)
        nodes.beat(*range(6))
    assert {rank for rank, name in nodes.calls if name == "set"} == {0, 3}
    assert all(rank.verdict() is None for rank in nodes.ranks)
    assert {rank for rank, name in nodes.calls if name == "check" and rank not in (0, 3)} == set()


def test_stopped_rank_does_not_silence_others(nodes: Nodes) -> None:
    nodes.beat(*range(6))
    # the first rank of the second node has stopped, and the second one replaces it
    for _ in range(12):
        time.sleep(BEAT)
        nodes.beat(0, 1, 2, 4, 5)
    received = nodes.received()

    assert received[3] == 1
    assert received[4] >= 12
    assert received[5] >= 12

    nodes.beat(3)  # rank 3 continues, and takes over the sending for its node again
    nodes.beat(4, 5)
    nodes.beat(3)

    assert nodes.received()[3] == 3


def test_exit_of_a_rank_is_received_and_the_last_rank_removes_the_folder(nodes: Nodes) -> None:
    nodes.beat(*range(6))
    folder = nodes.ranks[0]._folder
    assert folder is not None
    assert folder.is_dir()
    assert folder.stat().st_mode & 0o777 == 0o700

    nodes.beat(0, has_left=True)
    time.sleep(3 * BEAT)
    nodes.beat(2, 1)

    assert nodes.received()[1] == nodes.received()[2] == 2

    nodes.beat(2, has_left=True)
    nodes.beat(1, has_left=True)
    assert {rank for rank, sign in nodes.ranks[3].receive().items() if sign.has_left} == {0, 1, 2}
    assert not folder.exists()


def test_ranks_without_their_folder_send_for_themselves(nodes: Nodes) -> None:
    nodes.beat(*range(6))
    assert nodes.ranks[0]._folder is not None
    shutil.rmtree(nodes.ranks[0]._folder)
    for _ in range(2):
        nodes.beat(*reversed(range(6)))

    assert nodes.received() == dict.fromkeys(range(6), 3)


def test_verdict_reaches_every_rank_of_every_node(nodes: Nodes) -> None:
    nodes.beat(*range(6))
    assert nodes.ranks[4].declare("first") == b"first"
    assert nodes.ranks[0].declare("second") == b"first"
    assert [nodes.ranks[rank].verdict() for rank in (0, 3, 1, 2, 4, 5)] == [b"first"] * 6

    nodes.ranks[5].send_to_node(b"without the store")
    assert nodes.ranks[4].verdict() == b"without the store"


@pytest.mark.parametrize("lost", ["nothing", "the folders of the nodes", "the store"])
def test_one_rank_of_a_run_reports_its_failure(nodes: Nodes, lost: str) -> None:
    """If the store is lost, each node reports, because no rank knows of the others."""
    if lost == "the folders of the nodes":
        for first in (0, 3):
            shutil.rmtree(nodes.ranks[first]._folder)
    if lost == "the store":
        for exchange_of_rank in nodes.ranks:
            exchange_of_rank._store = LostStore()
    answers = [exchange_of_rank.is_first_to_report() for exchange_of_rank in nodes.ranks]

    assert answers.count(True) == (2 if lost == "the store" else 1)
    if lost == "nothing":
        assert sum(nodes.calls.values()) == 2, "one rank of each node must query the store"


class LostStore:
    def add(self, key: str, amount: int) -> int:
        raise dist.DistNetworkError("Connection reset by peer")


def test_end_waits_for_all_ranks_with_few_requests(nodes: Nodes) -> None:
    nodes.beat(*range(6))
    start = time.monotonic()
    end_times = []

    def wait(rank: HeartbeatExchange) -> None:
        rank.wait_for_others(6, 10)
        end_times.append(time.monotonic())

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in nodes.ranks[:5]]
    for thread in threads:
        thread.start()
    time.sleep(0.2)

    assert not end_times, "the sixth rank is still missing"

    nodes.ranks[5].wait_for_others(6, 10)
    for thread in threads:
        thread.join()
    assert len(end_times) == 5
    assert max(end_times) - start < 10
    assert {rank for rank, name in nodes.calls if name == "add"} <= {0, 3, *range(6)}


@pytest.mark.parametrize("how", ["open to all", "gone", "unknown", "one rank", "one machine"])
def test_without_a_private_folder_a_rank_sends_for_itself(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(exchange, "FOLDER_SECONDS", 0.05)
    environment = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1" if how == "one rank" else "2"}
    folder = tmp_path / "signs"
    if how == "open to all":
        folder.mkdir(mode=0o755)
    if how in ("open to all", "gone"):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        store.set(f"folder/{socket.gethostname()}/{boot}", str(folder))
    store_of_rank = exchange.FolderStore(tmp_path / "one") if how == "one machine" else store
    rank = HeartbeatExchange(store_of_rank, 1, 2, BEAT)
    rank.meet({**environment, STORE: ""})
    rank.say(Heartbeat(1, "host"))

    assert rank.receive()[1].beat == 1
    assert not folder.joinpath("sign-1").exists()


def test_invalid_heartbeat_is_skipped(nodes: Nodes) -> None:
    nodes.beat(0, 1, 2)
    nodes.store.set("place-2", json.dumps({"3": {"beat": "x"}, "a": {}, "4": None}))
    nodes.store.add("places", 1)
    assert nodes.received() == {0: 1, 1: 1, 2: 1} or set(nodes.received()) == {0}
