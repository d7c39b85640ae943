"""Signs of life travel through one rank of each node: all are received, and a rank that stops silences nobody else."""

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
    """A store that counts who asks what of it."""

    def __init__(self, store: dist.Store, calls: Counter[tuple[int, str]], rank: int) -> None:
        self._store, self._calls, self._rank = store, calls, rank

    def __getattr__(self, name: str) -> Any:
        self._calls[self._rank, name] += 1
        return getattr(self._store, name)


class Nodes:
    """Two nodes of three ranks each, pretended in this process."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.calls = dist.HashStore(), Counter[tuple[int, str]]()
        self.ranks = [HeartbeatExchange(Counted(self.store, self.calls, rank), rank, 6, BEAT) for rank in range(6)]
        self.beats = [0] * 6
        for rank, one in enumerate(self.ranks):
            runtime = tmp_path / f"node{rank // 3}"
            runtime.mkdir(exist_ok=True)
            monkeypatch.setattr(socket, "gethostname", lambda node=rank // 3: f"node{node}")
            one.meet({"LOCAL_RANK": str(rank % 3), "LOCAL_WORLD_SIZE": "3", "XDG_RUNTIME_DIR": str(runtime)})
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


def test_all_are_heard_and_one_rank_of_each_node_speaks(nodes: Nodes) -> None:
    for _ in range(5):
        nodes.beat(2, 1, 5, 4, 0, 3)
    assert nodes.received() == dict.fromkeys(range(6), 5)
    for _ in range(3):
        time.sleep(BEAT)
        nodes.beat(*range(6))
    assert {rank for rank, name in nodes.calls if name == "set"} == {0, 3}
    assert all(one.verdict() is None for one in nodes.ranks)
    assert {rank for rank, name in nodes.calls if name == "check" and rank not in (0, 3)} == set()


def test_a_rank_that_stops_is_silent_alone(nodes: Nodes) -> None:
    nodes.beat(*range(6))
    for _ in range(12):  # the first of the second node has stopped, and the second takes its place
        time.sleep(BEAT)
        nodes.beat(0, 1, 2, 4, 5)
    received = nodes.received()
    assert received[3] == 1 and received[4] >= 12 and received[5] >= 12
    nodes.beat(3)  # it continues, and speaks again
    nodes.beat(4, 5)
    nodes.beat(3)
    assert nodes.received()[3] == 3


def test_a_rank_that_leaves_is_heard_to_leave_and_the_last_clears_the_folder(nodes: Nodes) -> None:
    nodes.beat(*range(6))
    folder = nodes.ranks[0]._folder
    assert folder is not None and folder.is_dir() and folder.stat().st_mode & 0o777 == 0o700
    nodes.beat(0, has_left=True)
    time.sleep(3 * BEAT)
    nodes.beat(2, 1)
    assert nodes.received()[1] == nodes.received()[2] == 2
    nodes.beat(2, has_left=True)
    nodes.beat(1, has_left=True)
    assert {rank for rank, sign in nodes.ranks[3].receive().items() if sign.has_left} == {0, 1, 2}
    assert not folder.exists()


def test_ranks_whose_folder_is_cleaned_away_speak_for_themselves(nodes: Nodes) -> None:
    nodes.beat(*range(6))
    assert nodes.ranks[0]._folder is not None
    shutil.rmtree(nodes.ranks[0]._folder)
    for _ in range(2):
        nodes.beat(*reversed(range(6)))
    assert nodes.received() == dict.fromkeys(range(6), 3)


def test_a_verdict_reaches_every_rank_of_every_node(nodes: Nodes) -> None:
    nodes.beat(*range(6))
    assert nodes.ranks[4].declare("one") == b"one"
    assert nodes.ranks[0].declare("another") == b"one", "the first one counts"
    assert [nodes.ranks[rank].verdict() for rank in (0, 3, 1, 2, 4, 5)] == [b"one"] * 6
    nodes.ranks[5].send_to_node(b"of a store that does not answer")
    assert nodes.ranks[4].verdict() == b"of a store that does not answer", "the node needs no store to receive it"


def test_the_end_waits_for_all_and_asks_little(nodes: Nodes) -> None:
    nodes.beat(*range(6))
    begun, left = time.monotonic(), []
    threads = [
        threading.Thread(target=lambda one=one: (one.wait_for_others(6, 10), left.append(time.monotonic())))
        for one in nodes.ranks[:5]
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    assert not left, "the sixth is missing"
    nodes.ranks[5].wait_for_others(6, 10)
    for thread in threads:
        thread.join()
    assert len(left) == 5 and max(left) - begun < 10
    assert {rank for rank, name in nodes.calls if name == "add"} <= {0, 3, *range(6)}


@pytest.mark.parametrize("how", ["open to all", "gone", "never told", "one rank", "one machine"])
def test_without_a_folder_of_this_user_alone_a_rank_speaks_for_itself(
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
    own = exchange.FolderStore(tmp_path / "one") if how == "one machine" else store
    one = HeartbeatExchange(own, 1, 2, BEAT)
    one.meet({**environment, STORE: ""})
    one.say(Heartbeat(1, "here"))
    assert one.receive()[1].beat == 1 and not folder.joinpath("sign-1").exists()


def test_what_is_not_a_sign_of_life_is_skipped(nodes: Nodes) -> None:
    nodes.beat(0, 1, 2)
    nodes.store.set("place-2", json.dumps({"3": {"beat": "x"}, "a": {}, "4": None}))
    nodes.store.add("places", 1)
    assert nodes.received() == {0: 1, 1: 1, 2: 1} or set(nodes.received()) == {0}
