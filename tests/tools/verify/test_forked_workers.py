"""Forked ranks end with their results, with the first cause of a failure, or at their time limit."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from shardtrain.tools.verify import forked_workers
from shardtrain.utils.errors import ConfigError


def test_results_are_in_rank_order(tmp_path):
    def add(rank, num_ranks, start):
        total = torch.tensor(float(rank))
        dist.all_reduce(total)
        return [rank, num_ranks, start + total.item()]

    assert forked_workers.run(2, add, 10, folder=tmp_path, backend="gloo") == [
        [0, 2, 11.0],
        [1, 2, 11.0],
    ]


def fail(rank, num_ranks):
    if rank == 1:
        raise ValueError("planted\nmore")
    dist.barrier()


def die(rank, num_ranks):
    if rank == 1:
        os._exit(3)
    dist.barrier()


def killed(rank, num_ranks):
    """Die like under the OOM killer. The other rank, forked later, holds this rank's pipe and reports a gloo error."""
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def refuse(rank, num_ranks):
    raise ConfigError("this cannot be")


@pytest.mark.parametrize(
    ("function", "sentence", "refused"),
    [
        (fail, r"^rank 1: ValueError: planted \(test_forked_workers.py:\d+\)$", False),
        (die, "^rank 1: died: exit status 3$", False),
        (
            killed,
            "^rank 0: died: killed by SIGKILL, as the system does when memory runs out$",
            False,
        ),
        (refuse, "^this cannot be$", True),
    ],
)
def test_the_rank_that_failed_first_is_named(tmp_path, function, sentence, refused):
    with pytest.raises(forked_workers.RankFailed, match=sentence) as error:
        forked_workers.run(2, function, folder=tmp_path, backend="gloo")
    assert error.value.refused == refused


def test_a_rank_that_hangs_is_stopped(tmp_path):
    def hang(rank, num_ranks):
        time.sleep(600 if rank == 0 else 0)

    with pytest.raises(forked_workers.RankFailed, match="rank 0 did not answer"):
        forked_workers.run(2, hang, folder=tmp_path, limit_seconds=0.5)
