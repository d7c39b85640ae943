"""A bit that flips in what several ranks hold alike is found at the next comparison, and its rank is named."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny import make_run, tiny_config
from torch import Tensor

from shardtrain import train
from shardtrain.errors import NumericalError
from shardtrain.guards.replicas import Replicas, _checksum
from shardtrain.shards import local_tensor

FLIPS = int(os.environ.get("SHARDTRAIN_REPLICA_FLIPS", "12"))
"""Flipped bits per mesh."""
INTERVAL = 3
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def build(rank: int, parallelism: dict[str, Any], interval: int = INTERVAL) -> train.Run:
    config = tiny_config(
        model={"overrides": {"num_layers": 2}},
        parallelism=parallelism,
        training={"seq_len": 16, "local_batch_size": 2, "replica_check_interval": interval},
    )
    return make_run(rank, config)


def flip(tensor: Tensor, index: int, bit: int) -> None:
    flat = local_tensor(tensor.detach()).view(-1)
    bits = flat.view(INTEGERS[flat.element_size()])
    bits[index] ^= torch.tensor(1, dtype=bits.dtype) << bit


def held_by_two(run: train.Run, replicas: Replicas) -> list[str]:
    names = {name.removeprefix("model.") for name, _ in replicas._holders}
    return [name for name in run.runner.parameters() if name in names]


def flips(rank: int, parallelism: dict[str, Any]) -> list[tuple[str, int, str]]:
    run = build(rank, parallelism)
    replicas, chosen, size = Replicas(run), random.Random(1), torch.distributed.get_world_size()
    train.step(run)
    replicas.check(3, saves=False)
    found = []
    names = held_by_two(run, replicas)
    for _ in range(FLIPS):
        name, culprit = chosen.choice(names), chosen.randrange(size)
        parameter = run.runner.parameters().get(name)
        where, bit = chosen.random(), chosen.randrange(32)
        if rank == culprit and parameter is not None:
            index = int(where * local_tensor(parameter).numel())
            flip(parameter, index, bit)
        # nothing is compared between two intervals
        for step in (4, 5):
            replicas.check(step, saves=False)
        with pytest.raises(NumericalError) as caught:
            replicas.check(6, saves=False)
        found.append((name, culprit, str(caught.value)))
        if rank == culprit and parameter is not None:
            flip(parameter, index, bit)
        replicas.check(6, saves=False)
    return found


@pytest.mark.parametrize(
    ("size", "parallelism"),
    [
        (3, {"data_parallel_replicate_degree": 3}),
        (2, {"tensor_parallel_degree": 2}),
        (2, {"data_parallel_replicate_degree": 2, "shard_optimizer_states": True}),
    ],
    ids=["ddp", "tp", "zero"],
)
def test_each_flipped_bit_is_found_and_its_rank_and_tensor_named(size: int, parallelism: dict[str, Any]) -> None:
    results = run_ranks(size, flips, parallelism)
    assert all(rank == results[0] for rank in results) and len(results[0]) == FLIPS
    for name, culprit, message in results[0]:
        who = f"rank {culprit} differs from the other 2" if size == 3 else "ranks 0, 1 differ, and no majority"
        assert message.startswith(f"step 6: {name}: {who}")
    if "tensor_parallel_degree" in parallelism:  # what is split is compared with nothing
        assert {name.rpartition(".")[0].rpartition(".")[2] for name, *_ in results[0]} <= {
            "attn_norm",
            "ffn_norm",
            "norm",
        }


def others(rank: int) -> list[str]:
    sharded, off = build(rank, {}), build(rank, {"data_parallel_replicate_degree": 2}, interval=0)
    idle, replicas = Replicas(off), Replicas(sharded)
    if rank == 1:
        flip(next(iter(off.runner.parameters().values())), 0, 3)
        flip(next(iter(sharded.runner.parameters().values())), 0, 3)
    idle.check(3, saves=True)  # 0 compares nothing
    replicas.check(3, saves=False)  # no part is held twice
    sharded.state.samples_consumed += rank
    messages = []
    for step, saves in ((4, True), (6, False)):
        with pytest.raises(NumericalError) as caught:
            replicas.check(step, saves)
        messages.append(str(caught.value))
    replicas.check(7, saves=False)
    return messages


def test_counters_are_compared_on_every_mesh_and_before_each_save() -> None:
    for messages in run_ranks(2, others):
        assert [message.partition(":")[0] for message in messages] == ["step 4", "step 6"]
        assert "counter samples_consumed: ranks 0, 1 differ" in messages[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float64])
def test_a_checksum_changes_with_every_bit(dtype: torch.dtype) -> None:
    tensor = torch.arange(7).to(dtype)
    expected = _checksum(tensor)
    for index in range(7):
        for bit in range(8 * tensor.element_size() - 1):
            flip(tensor, index, bit)
            assert _checksum(tensor) != expected
            flip(tensor, index, bit)
    assert _checksum(tensor) == expected
    assert _checksum(torch.ones(3, 0, dtype=dtype)) == 0 and _checksum(torch.ones((), dtype=dtype)).dtype == torch.int64
