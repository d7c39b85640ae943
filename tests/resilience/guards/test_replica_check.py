"""The next comparison of replicas finds a flipped bit in a tensor that several ranks hold, and names the rank."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiers import cases
from tiny import make_run, shallow_config
from torch import Tensor

from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.checkpoint.replica_comparison import checksum
from shardtrain.config import Loaded
from shardtrain.config.schema import Config
from shardtrain.distributed.process_group import World
from shardtrain.ops.dtensor import local_tensor
from shardtrain.resilience.guards.replica_check import Replicas
from shardtrain.train import trainer
from shardtrain.utils.errors import NumericalError

FLIPS = int(os.environ.get("SHARDTRAIN_REPLICA_FLIPS", "12"))
"""Flipped bits per mesh."""
INTERVAL = 3
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def build(rank: int, parallelism: dict[str, Any], interval: int = INTERVAL) -> trainer.Run:
    config = shallow_config(
        model={"overrides": {"num_layers": 2}},
        parallelism=parallelism,
        training={"seq_len": 16, "local_batch_size": 2, "replica_check_interval": interval},
    )
    return make_run(rank, config)


def flip(tensor: Tensor, index: int, bit: int) -> None:
    flat = local_tensor(tensor.detach()).view(-1)
    bits = flat.view(INTEGERS[flat.element_size()])
    bits[index] ^= torch.tensor(1, dtype=bits.dtype) << bit


def replicated(run: trainer.Run, replicas: Replicas) -> list[str]:
    """Names of parameters of which several ranks have a copy."""
    assert replicas._held is not None
    names = set()
    for name, tensor in replicas._held.items():
        if any(part.holders > 1 for part in tensor.parts):
            names.add(name.removeprefix("model."))
    return [name for name in run.runner.parameters() if name in names]


def flips(rank: int, parallelism: dict[str, Any]) -> list[tuple[str, int, str]]:
    """Flip random bits on random ranks. Return the parameter and the rank of each, and the error of the check."""
    run = build(rank, parallelism)
    replicas = Replicas(run, Checkpoints(run.config))
    rng = random.Random(1)
    size = torch.distributed.get_world_size()
    trainer.step(run)
    replicas.check(3)
    results = []
    names = replicated(run, replicas)
    for _ in range(FLIPS):
        name = rng.choice(names)
        culprit = rng.randrange(size)
        parameter = run.runner.parameters().get(name)
        place = rng.random()
        bit = rng.randrange(32)
        if rank == culprit and parameter is not None:
            index = int(place * local_tensor(parameter).numel())
            flip(parameter, index, bit)
        # steps 4 and 5 are between two checks, so nothing is compared
        for step in (4, 5):
            replicas.check(step)
        with pytest.raises(NumericalError) as caught:
            replicas.check(6)
        results.append((name, culprit, str(caught.value)))
        if rank == culprit and parameter is not None:
            flip(parameter, index, bit)
        replicas.check(6)
    return results


@pytest.mark.parametrize(
    ("size", "parallelism"),
    [
        (3, {"data_parallel_replicate_degree": 3}),
        (2, {"tensor_parallel_degree": 2}),
        (2, {"data_parallel_replicate_degree": 2, "shard_optimizer_states": True}),
    ],
    ids=["ddp", "tp", "zero"],
)
def test_flipped_bit_is_reported_with_its_rank_and_tensor(
    size: int, parallelism: dict[str, Any]
) -> None:
    results = run_ranks(size, flips, parallelism)
    assert results == results[:1] * size
    assert len(results[0]) == FLIPS

    for name, culprit, message in results[0]:
        ranks = (
            f"rank {culprit} differs from the other 2"
            if size == 3
            else "ranks 0, 1 differ, and there is no majority"
        )
        assert message.startswith(f"step 6: {name}: {ranks}")
    if "tensor_parallel_degree" in parallelism:  # split tensors have no replicas
        modules = {name.split(".")[-2] for name, *_ in results[0]}
        assert modules <= {"attn_norm", "ffn_norm", "norm"}


def compare_counters(rank: int) -> list[str]:
    off = build(rank, {"data_parallel_replicate_degree": 2}, interval=0)
    sharded = build(rank, {})
    idle = Replicas(off, Checkpoints(off.config))
    replicas = Replicas(sharded, Checkpoints(sharded.config))
    if rank == 1:
        flip(next(iter(off.runner.parameters().values())), 0, 3)
        flip(next(iter(sharded.runner.parameters().values())), 0, 3)
    idle.check(3)  # an interval of 0 disables the check
    replicas.check(3)  # sharded parameters have no replicas to compare
    sharded.state.samples_consumed += rank
    with pytest.raises(NumericalError) as caught:
        replicas.check(6)
    replicas.check(7)
    return [str(caught.value)]


def test_counters_are_compared_on_every_mesh() -> None:
    for [message] in run_ranks(2, compare_counters):
        assert message.startswith("step 6: counter samples_consumed: ranks 0, 1 differ")
        assert "no checkpoint is known to be without it" in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float64])
def test_checksum_changes_with_every_bit(dtype: torch.dtype) -> None:
    tensor = torch.arange(7).to(dtype)
    expected = checksum(tensor)
    for index in range(7):
        for bit in range(8 * tensor.element_size() - 1):
            flip(tensor, index, bit)
            assert checksum(tensor) != expected
            flip(tensor, index, bit)

    assert checksum(tensor) == expected
    assert checksum(torch.ones(3, 0, dtype=dtype)) == 0
    assert checksum(torch.ones((), dtype=dtype)).dtype == torch.int64


REPLICATED: list[tuple[int, dict[str, Any]]] = [
    (2, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}),
    (4, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}),
    (2, {"tensor_parallel_degree": 2}),
]


def run_of(folder: Path, parallelism: dict[str, Any], mode: str, **checkpoint: Any) -> Config:
    return shallow_config(
        job={"dump_folder": str(folder)},
        parallelism=parallelism,
        training={"seq_len": 16, "local_batch_size": 2, "steps": 6},
        checkpoint={"enable": True, "interval": 2, "async_mode": mode, **checkpoint},
    )


def losses(rank: int, config: Config, flipped: int = 0, name: str = "exp_avg_sq") -> dict[str, Any]:
    """Return losses by step, or the error. After step ``flipped``, a bit of the last rank's optimizer state flips."""
    steps: dict[str, Any] = {}
    step = trainer.step

    def noting_losses(run: trainer.Run) -> Any:
        outcome = step(run)
        if outcome is not None:
            loss = run.mesh.sum_of_all(outcome.loss_sum.detach().double().reshape(1)).item()
            steps[str(run.state.step)] = loss
        if run.state.step == flipped and rank == torch.distributed.get_world_size() - 1:
            flip(run.optimizer_state_dict()[f"optimizer.norm.weight.{name}"], 0, 20)
        return outcome

    trainer.step = (
        noting_losses  # not restored, because each rank is a process that ends after this function
    )
    try:
        trainer.train(
            Loaded(config), World(rank, torch.distributed.get_world_size(), 0, torch.device("cpu"))
        )
    except NumericalError as error:
        return {"error": str(error), "code": error.exit_code}
    return steps


@pytest.mark.parametrize(
    ("mesh", "mode", "flipped"),
    cases(
        [(0, "disabled", 4)],
        nightly=[
            (mesh, mode, flipped)
            for mesh in range(3)
            for mode in ("disabled", "async")
            for flipped in (1, 2, 3, 4)
            if (mesh, flipped) != (0, 4)
        ],
    ),
)
def test_different_replicas_are_not_saved_and_the_run_resumes_bitwise(
    mesh: int, mode: str, flipped: int, tmp_path: Path
) -> None:
    size, parallelism = REPLICATED[mesh]
    undisturbed = run_ranks(size, losses, run_of(tmp_path / "undisturbed", parallelism, mode))[0]
    config = run_of(tmp_path / "run", parallelism, mode)
    folder = tmp_path / "run" / "checkpoint"
    refused = flipped + flipped % 2
    good = refused - 2
    # A save right after the flip finds it in the optimizer state. One step later, the weight updated with this
    # state differs too, and weights are compared first.
    first = "norm.weight" if flipped % 2 else "optimizer.norm.weight.exp_avg_sq: rank"
    hint = "no checkpoint is known to be without it"
    saved = []
    if good:
        hint = f"the last checkpoint known to be without it is {folder / f'step-{good}'}"
        saved = [f"step-{good}"]

    for result in run_ranks(size, losses, config, flipped):
        assert result["code"] == 4
        assert result["error"].startswith(f"step {refused}: {first}")
        assert hint in result["error"]
    assert [path.name for path in folder.glob("step-*")] == saved

    # From the last good checkpoint, the run continues bitwise.
    resumed = run_ranks(size, losses, config)[0]
    assert resumed == {step: loss for step, loss in undisturbed.items() if int(step) > good}


def test_checkpoint_saved_without_a_comparison_is_not_called_good(tmp_path: Path) -> None:
    size, parallelism = REPLICATED[0]
    run_ranks(size, losses, run_of(tmp_path, parallelism, "disabled", compare_replicas=False), 1)
    shutil.rmtree(tmp_path / "checkpoint" / "step-6")
    for result in run_ranks(size, losses, run_of(tmp_path, parallelism, "disabled"), 5):
        assert "no checkpoint is known to be without it" in result["error"]
