"""A tiny Llama and a few steps of the real trainer on it, for laws about meshes.

The optimizer's eps is large: AdamW with a small one turns rounding of 1e-8 in a gradient into 1e-4 in a weight within
five steps, which would hide what a law is about.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ranks import run_ranks
from shardtrain import train
from shardtrain.config.schema import Config
from shardtrain.parallel import LOSS_AXES
from shardtrain.parallel.world import World
from shardtrain.shards import to_full

SHAPE = {"vocab_size": 512, "dim": 64, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn_dim": 128}


@functools.cache
def text_file() -> str:
    """A file of 60,000 bytes of words, the same in every run."""
    words = ["mesh", "shard", "gather", "reduce", "loss", "token", "layer", "rank", "step", "seed", "weight", "norm"]
    chosen = random.Random(0).choices(words, k=10_000)
    path = os.path.join(tempfile.mkdtemp(prefix="shardtrain-tests-"), "words.txt")
    with open(path, "w") as file:
        file.write(" ".join(chosen))
    return path


def tiny_config(**sections: dict[str, Any]) -> Config:
    """The tiny run, with the keys of sections replaced: ``tiny_config(parallelism={"tensor_parallel_degree": 2})``."""
    defaults: dict[str, dict[str, Any]] = {
        "model": {"overrides": SHAPE},
        "training": {
            "dataset": "text",
            "dataset_path": text_file(),
            "local_batch_size": 2,
            "global_batch_size": 8,
            "seq_len": 64,
            "steps": 10,
            "mixed_precision_param": "float32",
            "device": "cpu",
        },
        "optimizer": {"lr": 1e-2, "eps": 1e-3},
        "lr_scheduler": {"warmup_steps": 2},
        "activation_checkpoint": {"mode": "none"},
        "metrics": {"log_freq": 1},
    }
    config = Config()
    for name, values in {**defaults, **sections}.items():
        merged = {**defaults.get(name, {}), **values}
        if name == "model" and "overrides" in values:
            merged["overrides"] = {**SHAPE, **values["overrides"]}
        config = dataclasses.replace(config, **{name: dataclasses.replace(getattr(config, name), **merged)})
    return config


@dataclass(frozen=True)
class Result:
    """What a run came to: per step the global mean loss and the gradient norm; weights before and after, whole."""

    losses: list[float]
    grad_norms: list[float]
    lrs: list[float]
    initial: dict[str, Tensor]
    final: dict[str, Tensor]
    sample_ids: list[list[int]]
    state: dict[str, int]
    facts: dict[str, Any]


def make_run(rank: int, config: Config) -> train.Run:
    """Build the run of one rank, whose process group exists."""
    return train.build(config, World(rank, torch.distributed.get_world_size(), rank, torch.device("cpu")))


def whole(run: train.Run) -> dict[str, Tensor]:
    """All weights of the run, whole, on every rank."""
    return {name: to_full(p.detach()).clone() for name, p in run.runner.parameters().items()}


def train_steps(rank: int, config: Config, steps: int) -> Result:
    """Train some steps as one rank."""
    run = make_run(rank, config)
    initial, losses, norms, lrs, ids = whole(run), [], [], [], []
    pull = run.stream.__next__

    class Recorded:
        def __getattr__(self, name: str) -> Any:
            return getattr(stream, name)

        def __next__(self) -> Any:
            batch = pull()
            ids[-1].extend(batch.sample_ids_B.tolist())
            return batch

    stream, run.stream = run.stream, Recorded()  # type: ignore[assignment]
    for _ in range(steps):
        ids.append([])
        outcome = train.step(run)
        loss = run.mesh.sum(outcome.loss_sum.double(), over=("pp", *LOSS_AXES)).item() / outcome.global_tokens
        losses.append(loss)
        norms.append(outcome.grad_norm)
        lrs.append(outcome.lr)
    optimizer_bytes = sum(
        t.to_local().nbytes if hasattr(t, "to_local") else t.nbytes
        for state in run.optimizer.state.values()
        for t in state.values()
    )
    local_numel = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in run.runner.parameters().values())
    facts = {"optimizer_bytes": optimizer_bytes, "local_numel": local_numel, "num_params": run.num_params}
    return Result(losses, norms, lrs, initial, whole(run), ids, run.state.to_dict(), facts)


def run_tiny(num_ranks: int, config: Config, steps: int = 10) -> list[Result]:
    """The results of all ranks."""
    return run_ranks(num_ranks, train_steps, config, steps)


@functools.cache
def reference(steps: int = 10) -> Result:
    """One process, no accumulation, float32: what every mesh is compared with."""
    return run_tiny(1, tiny_config(training={"local_batch_size": 8}), steps)[0]


def assert_same_numbers(result: Result, expected: Result, loss: float = 1e-5, grad_norm: float = 1e-4) -> None:
    """Initial weights bitwise, losses and norms of each step to rounding."""
    assert result.initial.keys() == expected.initial.keys()
    for name, weight in expected.initial.items():
        assert torch.equal(result.initial[name], weight), f"initial {name} differs"
    assert len(result.losses) == len(expected.losses)
    for step, (mine, theirs) in enumerate(zip(result.losses, expected.losses, strict=True), 1):
        assert abs(mine - theirs) <= loss, f"step {step}: loss {mine} is not {theirs}"
    for step, (mine, theirs) in enumerate(zip(result.grad_norms, expected.grad_norms, strict=True), 1):
        assert abs(mine - theirs) <= grad_norm, f"step {step}: gradient norm {mine} is not {theirs}"
