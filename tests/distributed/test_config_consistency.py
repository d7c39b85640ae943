"""Rank 0's requests to the store while it compares all ranks do not grow faster than their number."""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any

import pytest

from shardtrain.config.schema import Comm, Config
from shardtrain.distributed import config_consistency
from shardtrain.utils.errors import ConfigError, PeerError


class Store:
    """Store to which ranks have published their facts, such as their configuration. It counts rank 0's requests."""

    def __init__(self, ranks: int, facts: dict[int, Any]) -> None:
        self.keys: dict[str, str] = {}
        for rank, facts_of_rank in facts.items():
            self.arrive(rank, facts_of_rank)
        self.requests = 0
        self.ranks = ranks

    def arrive(self, rank: int, facts_of_rank: Any) -> None:
        self.keys[f"agreement/facts-{rank}"] = json.dumps(facts_of_rank)

    def set(self, key: str, value: str) -> None:
        self.keys[f"agreement/{key}"] = value

    def check(self, keys: list[str]) -> bool:
        self.requests += 1
        return all(f"agreement/{key}" in self.keys for key in keys)

    def get(self, key: str) -> bytes:
        self.requests += 1
        return self.keys[f"agreement/{key}"].encode()


@pytest.fixture(autouse=True)
def plain_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_consistency.dist, "PrefixStore", lambda prefix, store: store)


@functools.cache
def facts(ranks: int) -> dict[str, str]:
    return config_consistency.facts_of(Config(), ranks)


def test_each_arrived_rank_costs_two_requests() -> None:
    store = Store(4096, {rank: [facts(4096), {}, "host"] for rank in range(1, 4096)})
    config_consistency.check(Config(), store, 0, 4096)
    assert store.requests == 2 * 4095 + 1


def test_polling_for_missing_ranks_costs_the_same_for_any_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each round polls a fixed number of ranks, and finds late ranks wherever they are in the order."""
    rounds: list[int] = []
    store = Store(4096, {rank: [facts(4096), {}, "host"] for rank in range(1, 4000)})

    def sleep(seconds: float) -> None:
        rounds.append(store.requests)
        if len(rounds) == 300:
            for rank in range(4000, 4096):
                store.arrive(rank, [facts(4096), {}, "host"])

    monkeypatch.setattr(config_consistency.time, "sleep", sleep)
    config_consistency.check(Config(), store, 0, 4096)
    requests_per_round = [after - before for before, after in itertools.pairwise(rounds)]

    assert max(requests_per_round) <= 2 * config_consistency._RANKS_PER_POLL
    assert len(rounds) < 320


def test_differing_rank_is_named_before_others_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_consistency, "_HEARD_SECONDS", 0)
    with pytest.raises(ConfigError, match="number of ranks: 300 on rank 0, 200 on rank 270"):
        config_consistency.check(Config(), Store(300, {270: [facts(200), {}, "host"]}), 0, 300)


def test_missing_ranks_are_named_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(0, 100_000, 7))
    monkeypatch.setattr(config_consistency.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(config_consistency.time, "sleep", lambda seconds: None)
    config = Config(comm=Comm(init_timeout_seconds=60))
    own_facts = config_consistency.facts_of(config, 100)
    store = Store(
        100, {rank: [own_facts, {}, "host"] for rank in range(1, 100) if rank not in (40, 3)}
    )

    with pytest.raises(PeerError, match="rank 3, 40 has not arrived"):
        config_consistency.check(config, store, 0, 100)
