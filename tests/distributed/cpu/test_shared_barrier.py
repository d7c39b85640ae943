"""The barrier in shared memory: ranks wait for each other, and detect a rank that ended or does not arrive."""

from __future__ import annotations

import mmap
import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from shardtrain.distributed.cpu import shared_barrier
from shardtrain.distributed.cpu.shared_barrier import (
    LINE_BYTES,
    Barrier,
    Process,
    can_meet,
    own_process,
)
from shardtrain.utils.errors import PeerError

pytestmark = pytest.mark.skipif(
    not own_process().number, reason="requires futexes of Linux on x86-64"
)


def _barrier(memory: mmap.mmap, rank: int, limit: float = 300.0) -> Barrier:
    own_numbers = torch.tensor(own_process())
    all_processes = [torch.zeros_like(own_numbers) for _ in range(dist.get_world_size())]
    dist.all_gather(all_processes, own_numbers)
    processes = [Process(*numbers.tolist()) for numbers in all_processes]
    assert can_meet(processes)
    return Barrier(memory, processes, rank, lambda: limit)


def _turns(rank: int, memory: mmap.mmap, ranks: int, first_turn: int) -> None:
    barrier = _barrier(memory, rank)
    barrier._turn = first_turn
    for counter in barrier._counters:
        counter.value = first_turn % 2**32
    dist.barrier()
    written = torch.frombuffer(memory, dtype=torch.int64, offset=ranks * LINE_BYTES)[
        : 2 * ranks
    ].view(2, ranks)
    for turn in range(300):
        if turn % 7 == rank:
            time.sleep(0.001)  # a different rank arrives last
        written[turn % 2, rank] = turn
        barrier.wait()
        assert written[turn % 2].tolist() == [turn] * ranks


@pytest.mark.parametrize("first_turn", [0, 2**32 - 100])  # counters wrap around during the test
def test_writes_before_the_barrier_are_visible_after_it(first_turn: int) -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE)  # shared by forked ranks
    run_ranks(3, _turns, memory, 3, first_turn)


def _ends(rank: int, memory: mmap.mmap) -> str:
    shared_barrier._CHECK_SECONDS = 0.05
    barrier = _barrier(memory, rank)
    barrier.wait()
    if rank == 1:
        return ""  # the process ends
    with pytest.raises(PeerError) as caught:
        barrier.wait()
    return str(caught.value)


def test_barrier_fails_if_a_rank_has_ended() -> None:
    text, _ = run_ranks(2, _ends, mmap.mmap(-1, mmap.PAGESIZE))
    assert text == "rank 1 of the ranks that share memory with this one has ended"


def _late(rank: int, memory: mmap.mmap) -> str:
    shared_barrier._CHECK_SECONDS = 0.05
    barrier = _barrier(memory, rank, limit=0.2)
    text = ""
    if rank == 0:
        with pytest.raises(PeerError) as caught:
            barrier.wait()
        text = str(caught.value)
    dist.barrier()  # rank 1 is alive, and waits in another collective
    return text


def test_barrier_times_out_with_the_limit_of_the_group() -> None:
    text, _ = run_ranks(2, _late, mmap.mmap(-1, mmap.PAGESIZE))
    assert text.startswith(
        "rank 1 of the ranks that share memory with this one did not arrive within 0.2 s"
    )
    assert "comm.train_timeout_seconds" in text


def test_barrier_requires_ranks_that_can_detect_each_others_end() -> None:
    process = own_process()
    assert process.number == os.getpid()
    assert can_meet([process, process])
    assert not can_meet([process, Process(0, 0, 0)])
    assert not can_meet([process, process._replace(namespace=process.namespace + 1)])
