"""Collectives on small CPU tensors: right on any number of ranks, in a number of messages that grows as log(ranks)."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import patience
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiers import cases
from tiny import tiny_config, train_whole

from shardtrain.ops import host_collectives
from shardtrain.ops.host_collectives import RING_UP_TO, gather_by_doubling, hops, reduce_by_doubling

SIZES = [*range(1, 18), 31, 33, 48, 64]
LARGEST = 16_384


class Network:
    """Simulate ranks with threads. Each message carries the longest chain of messages before it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.mailboxes: dict[tuple[int, int], queue.Queue] = defaultdict(queue.Queue)
        self.chain = [0] * size

    def exchange_of(self, rank: int):
        def exchange(sent, target, received, source) -> None:
            if sent is not None:
                self.mailboxes[rank, target].put((sent.clone(), self.chain[rank] + 1))
            if received is not None:
                value, chain = self.mailboxes[source, rank].get(timeout=patience.seconds(20))
                received.copy_(value)
                self.chain[rank] = max(self.chain[rank], chain)

        return exchange

    def run(self, function) -> None:
        errors: list[BaseException] = []

        def guarded(rank: int) -> None:
            try:
                function(rank, self.exchange_of(rank))
            except BaseException as error:
                errors.append(error)

        # create all mailboxes first, because two threads share each of them
        for source in range(self.size):
            for target in range(self.size):
                self.mailboxes[source, target] = queue.Queue()
        threads = []
        for rank in range(self.size):
            threads.append(threading.Thread(target=guarded, args=(rank,), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(patience.seconds(30))
        assert not errors, errors[0]


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_get_the_same_bits_in_as_many_messages_as_stated(size: int) -> None:
    numbers = torch.rand(
        size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(size)
    )
    results = numbers.clone()
    network = Network(size)
    network.run(
        lambda rank, exchange: reduce_by_doubling(results[rank], torch.add, rank, size, exchange)
    )

    assert all(torch.equal(result, results[0]) for result in results)
    # float64 sums in a different order
    torch.testing.assert_close(results[0], numbers.sum(0), rtol=1e-14, atol=0)
    if size > RING_UP_TO:
        assert hops(size) - 1 <= max(network.chain) <= hops(size)


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_gathers_the_numbers_of_all_in_order(size: int) -> None:
    gathered = torch.full((size, size, 2), -1)
    network = Network(size)

    def gather(rank: int, exchange: Any) -> None:
        gather_by_doubling(gathered[rank], torch.tensor([rank, rank * rank]), rank, size, exchange)

    network.run(gather)
    expected = torch.tensor([[rank, rank * rank] for rank in range(size)])

    assert all(torch.equal(rows, expected) for rows in gathered)
    assert max(network.chain) <= (size - 1).bit_length()


def test_the_number_of_sequential_messages_grows_as_the_logarithm() -> None:
    assert hops(LARGEST) == 14
    assert max(hops(size) for size in range(2, LARGEST, 97)) <= 15


def summed_in_two_groups(rank: int) -> float:
    groups = [dist.new_group(list(range(start, start + 10))) for start in (0, 10)]
    total = torch.tensor([float(rank)])
    host_collectives.all_reduce(total, group=groups[rank // 10])
    return float(total)


@pytest.mark.nightly(
    "twenty ranks", by="tests/ops/test_host_collectives.py::test_real_ranks_reduce_and_gather"
)
def test_a_group_reduces_its_own_ranks() -> None:
    assert run_ranks(20, summed_in_two_groups) == [45.0] * 10 + [145.0] * 10


def reduced_and_gathered(rank: int) -> tuple[list[float], int, int, list[int]]:
    total = torch.tensor([rank, 0.5], dtype=torch.float64)
    host_collectives.all_reduce(total)
    largest = torch.tensor([rank])
    smallest = torch.tensor([rank + 3])
    host_collectives.all_reduce(largest, dist.ReduceOp.MAX)
    host_collectives.all_reduce(smallest, dist.ReduceOp.MIN)
    transposed = torch.ones(2, 3).t()
    host_collectives.all_reduce(transposed)
    assert torch.equal(transposed, torch.full((3, 2), float(dist.get_world_size())))
    return (
        total.tolist(),
        int(largest),
        int(smallest),
        host_collectives.all_gather(torch.tensor(rank)).tolist(),
    )


@pytest.mark.parametrize("size", cases([3, 11], nightly=[16]))
def test_real_ranks_reduce_and_gather(size: int) -> None:
    expected = ([size * (size - 1) / 2, size / 2], size - 1, 3, list(range(size)))
    assert run_ranks(size, reduced_and_gathered) == [expected] * size


def collectives_of_a_run(rank: int, folder: Path, steps: int) -> int:
    """Return the number of collectives over all ranks in a run."""
    count = 0

    def counting(collective: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += named.get("group") in (None, dist.group.WORLD)
            return collective(*arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather", "broadcast", "barrier"):
            patch.setattr(dist, name, counting(getattr(dist, name)))
        train_whole(
            rank,
            tiny_config(
                job={"dump_folder": str(folder)},
                training={"steps": steps},
                metrics={"log_freq": 100},
            ),
        )
    return count


def test_a_step_has_at_most_64_sequential_messages_on_16384_ranks(tmp_path: Path) -> None:
    few, many = (
        run_ranks(2, collectives_of_a_run, tmp_path / str(steps), steps)[0] for steps in (4, 9)
    )
    collectives_of_a_step = (many - few) / 5
    assert collectives_of_a_step >= 1
    assert collectives_of_a_step * hops(LARGEST) <= 64
