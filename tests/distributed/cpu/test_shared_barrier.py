"""Ranks that share memory wait for each other, and none waits for one that has ended or does not come."""

from __future__ import annotations

import mmap
import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from shardtrain.distributed.cpu import shared_barrier
from shardtrain.distributed.cpu.shared_barrier import LINE_BYTES, Barrier, Process, can_meet, own_process
from shardtrain.utils.errors import PeerError

pytestmark = pytest.mark.skipif(not own_process().number, reason="no futexes of Linux on x86-64")


def _barrier(memory: mmap.mmap, rank: int, limit: float = 300.0) -> Barrier:
    own = torch.tensor(own_process())
    all_processes = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(all_processes, own)
    processes = [Process(*one.tolist()) for one in all_processes]
    assert can_meet(processes)
    return Barrier(memory, processes, rank, lambda: limit)


def _turns(rank: int, memory: mmap.mmap, ranks: int, first_turn: int) -> None:
    barrier = _barrier(memory, rank)
    barrier._turn = first_turn
    for counter in barrier._counters:
        counter.value = first_turn % 2**32
    dist.barrier()
    written = torch.frombuffer(memory, dtype=torch.int64, offset=ranks * LINE_BYTES)[: 2 * ranks].view(2, ranks)
    for turn in range(300):
        if turn % 7 == rank:
            time.sleep(0.001)  # another one comes last
        written[turn % 2, rank] = turn
        barrier.wait()
        assert written[turn % 2].tolist() == [turn] * ranks


@pytest.mark.parametrize("first_turn", [0, 2**32 - 100])  # counters begin again within the turns
def test_what_all_wrote_before_is_seen_after(first_turn: int) -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE)  # forked ranks share it
    run_ranks(3, _turns, memory, 3, first_turn)


def _ends(rank: int, memory: mmap.mmap) -> str:
    shared_barrier._CHECK_SECONDS = 0.05
    barrier = _barrier(memory, rank)
    barrier.wait()
    if rank == 1:
        return ""  # and its process ends
    with pytest.raises(PeerError) as told:
        barrier.wait()
    return str(told.value)


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    text, _ = run_ranks(2, _ends, mmap.mmap(-1, mmap.PAGESIZE))
    assert text == "rank 1 of the ranks that share memory with this one has ended"


def _late(rank: int, memory: mmap.mmap) -> str:
    shared_barrier._CHECK_SECONDS = 0.05
    barrier = _barrier(memory, rank, limit=0.2)
    text = ""
    if rank == 0:
        with pytest.raises(PeerError) as told:
            barrier.wait()
        text = str(told.value)
    dist.barrier()  # the other one lives, and waits elsewhere
    return text


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_the_groups_limit_says() -> None:
    text, _ = run_ranks(2, _late, mmap.mmap(-1, mmap.PAGESIZE))
    assert text.startswith("rank 1 of the ranks that share memory with this one did not arrive within 0.2 s")
    assert "comm.train_timeout_seconds" in text


def test_processes_that_cannot_tell_whether_each_other_runs_do_not_meet() -> None:
    own = own_process()
    assert own.number == os.getpid() and can_meet([own, own])
    assert not can_meet([own, Process(0, 0, 0)])
    assert not can_meet([own, own._replace(namespace=own.namespace + 1)])
