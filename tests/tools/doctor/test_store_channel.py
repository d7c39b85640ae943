"""Traffic between the doctor's ranks and the store does not grow with the number of ranks, except on rank 0."""

from __future__ import annotations

import collections
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import patience
import pytest
import torch.distributed as dist
from patients import examined

from shardtrain.tools.doctor import network, storage_checks
from shardtrain.tools.doctor.store_channel import LOOKS_PER_SECOND, StoreChannel
from shardtrain.utils.errors import PeerError


class CountedStore:
    """A store in this process that counts the requests and the bytes of one rank."""

    def __init__(self, store: dist.HashStore) -> None:
        self.store = store
        self.requests: collections.Counter[str] = collections.Counter()
        self.num_bytes = 0

    def set(self, key: str, value: str) -> None:
        self.requests["set"] += 1
        self.num_bytes += len(value)
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        self.requests["get"] += 1
        value = self.store.get(key)
        self.num_bytes += len(value)
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.requests["multi_get"] += 1
        values = [self.store.get(key) for key in keys]
        self.num_bytes += sum(map(len, values))
        return values

    def add(self, key: str, amount: int) -> int:
        self.requests["add"] += 1
        return self.store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        self.requests["check"] += 1
        return self.store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.requests["wait"] += 1
        self.store.wait(keys, timeout)


def channels(size: int) -> list[StoreChannel]:
    store = dist.HashStore()
    lines = []
    for rank in range(size):
        line = StoreChannel(SimpleNamespace(clone=dist.HashStore), rank, size, patience.seconds(60))
        line._store = CountedStore(store)
        lines.append(line)
    return lines


def exchange(
    size: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[StoreChannel], list[int]]:
    """Run the checks of host names and of shared storage on ``size`` ranks, eight per host.

    Return the channels of all ranks, and the host number of each rank as rank 1 knows it.
    """
    names = threading.local()
    monkeypatch.setattr("socket.gethostname", lambda: names.host)
    lines = channels(size)
    places = {"job.dump_folder": folder}

    def run(rank: int) -> list[int]:
        names.host = f"host-{rank // 8}"
        context = SimpleNamespace(
            line=lines[rank], rank=rank, size=size, limit_seconds=patience.seconds(60)
        )
        hosts = network._hosts(context)
        is_first = rank % 8 == 0
        (folder / f"{storage_checks.PREFIX}x-{rank}").touch()
        results = {"job.dump_folder": {"signed": is_first}}
        storage_checks._look(context, places, results, f"{storage_checks.PREFIX}x-")
        assert results["job.dump_folder"]["unseen"] == []
        return hosts

    with ThreadPoolExecutor(size) as ranks:
        return lines, list(ranks.map(run, range(size)))[1]


def test_a_rank_sends_and_receives_the_same_whatever_the_number_of_ranks(tmp_path, monkeypatch):
    counts = {}
    for size in (16, 64, 256):
        folder = tmp_path / str(size)
        folder.mkdir()
        lines, hosts = exchange(size, folder, monkeypatch)
        assert hosts == [rank // 8 for rank in range(size)]
        # Ranks poll the store while they wait. Count only set and get, because the number of polls depends on time.
        steady = [line._store.requests["set"] + line._store.requests["get"] for line in lines[1:]]
        counts[size] = (max(steady), max(line._store.num_bytes for line in lines[1:]))
    requests = [requests for requests, _ in counts.values()]
    num_bytes = [num_bytes for _, num_bytes in counts.values()]

    # The last rank to arrive at a barrier sends an additional request.
    assert max(requests) - min(requests) <= 3, counts
    # The bytes grow by one list item (a number of up to three digits) per host, up to MOST_SIGNERS hosts, and by a
    # few bytes for longer rank numbers.
    assert max(num_bytes) - min(num_bytes) < 5 * (256 - 16) // 8 + 20, counts


def test_the_facts_of_a_rank_do_not_contain_the_members_of_its_groups(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    of_two = examined(2, tmp_path / "a", ["network", "storage"])
    of_four = examined(4, tmp_path / "b", ["network", "storage"])
    sizes = []
    for reports in (of_two, of_four):
        facts = reports.facts[1]["network"]["collectives"]
        sizes.append(max(len(json.dumps({**one, "rate": 0, "latency": 0})) for one in facts))
        assert {one["size"] for one in facts} == {reports.size}

    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("size", [2, 100, 1_000, 16_384])
def test_ranks_that_wait_send_few_requests(size, monkeypatch):
    """All ranks together poll at most ``LOOKS_PER_SECOND`` times a second, or four times each if they are few."""
    (line,) = channels(1)
    line.size = size
    waits: list[float] = []
    now = [0.0]

    def wait(_keys: list[str], timeout: timedelta) -> None:
        waits.append(timeout.total_seconds())
        now[0] += waits[-1]
        raise dist.DistStoreError("wait timeout")

    line._store.wait = wait
    monkeypatch.setattr("shardtrain.tools.doctor.store_channel.time.monotonic", lambda: now[0])

    assert not line._comes("never", 60.0)
    assert sum(waits) == pytest.approx(60)
    assert size * len(waits) / 60 <= max(min(4 * size, 1000), 1.1 * LOOKS_PER_SECOND)


def test_a_waiting_rank_hears_of_one_that_gave_up():
    lines = channels(2)
    both = [line.begin("network") for line in lines]
    both[1].mark("joining the process group")
    both[1].cancel()

    with pytest.raises(PeerError, match="rank 1 did not get past joining the process group"):
        both[0].meet("all_reduce")
