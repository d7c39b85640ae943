"""A tiny Llama and a few steps of the real trainer, for tests of meshes.

The optimizer's eps is large. With a small eps, AdamW turns a rounding error of 1e-8 in a gradient into 1e-4 in a weight
within five steps, which would hide faults.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks
from torch import Tensor

from shardtrain import data, optim
from shardtrain.config import Loaded
from shardtrain.config.schema import Config
from shardtrain.distributed import LOSS_AXES
from shardtrain.distributed.process_group import World
from shardtrain.ops.dtensor import local_tensor, to_full
from shardtrain.train import trainer
from shardtrain.utils import log
from shardtrain.utils.errors import PeerError, ShardtrainError

# enough steps to expose a wrong update, optimizer state or learning rate
STEPS = 4

SHAPE = {
    "vocab_size": 512,
    "dim": 64,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "ffn_dim": 128,
}

QWEN3_NEXT = {
    "rotary_pct": 0.5,
    "linear_key_heads": 2,
    "linear_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "moe_ffn_dim": 48,
    "shared_ffn_dim": 32,
    "num_experts": 8,
    "top_k": 2,
}
"""Fields of a tiny Qwen3-Next, except those that all families have. The sizes of keys and values differ."""

LAYERS = 2
"""Number of layers. It determines the time of these tiny runs, and most tests do not depend on it."""


@functools.cache
def text_file() -> str:
    """Return the path of a text file with 60,000 bytes, the same in every run."""
    vocabulary = [
        "mesh",
        "shard",
        "gather",
        "reduce",
        "loss",
        "token",
        "layer",
        "rank",
        "step",
        "seed",
        "weight",
        "norm",
    ]
    chosen = random.Random(0).choices(vocabulary, k=10_000)
    path = os.path.join(tempfile.mkdtemp(prefix="shardtrain-tests-"), "words.txt")
    with open(path, "w") as file:
        file.write(" ".join(chosen))
    return path


def tiny_config(**sections: dict[str, Any]) -> Config:
    """Return the tiny configuration with other options: ``tiny_config(parallelism={"tensor_parallel_degree": 2})``."""
    defaults: dict[str, dict[str, Any]] = {
        "model": {"overrides": {**SHAPE, "num_layers": LAYERS}},
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
            merged["overrides"] = {**defaults["model"]["overrides"], **values["overrides"]}
        config = dataclasses.replace(
            config, **{name: dataclasses.replace(getattr(config, name), **merged)}
        )
    return config


def deep_config(**sections: dict[str, Any]) -> Config:
    """Return the tiny configuration with four layers, for tests that need more than two layers or stages."""
    model = sections.pop("model", {})
    overrides = {"num_layers": SHAPE["num_layers"], **model.get("overrides", {})}
    return tiny_config(model={**model, "overrides": overrides}, **sections)


def shallow_config(**sections: dict[str, Any]) -> Config:
    """Return the tiny configuration with one layer per stage, for tests of complete runs, their data and files."""
    model = sections.pop("model", {})
    stages = sections.get("parallelism", {}).get("pipeline_parallel_degree", 1)
    overrides = {"num_layers": stages, **model.get("overrides", {})}
    return tiny_config(model={**model, "overrides": overrides}, **sections)


@dataclass(frozen=True)
class Result:
    """Results of a few training steps on one rank.

    Attributes:
        losses: Global mean loss of each step.
        grad_norms: Gradient norm of each step.
        lrs: Learning rate of each step.
        initial: Unsharded weights before the first step.
        final: Unsharded weights after the last step.
        sample_ids: Sample ids of this rank's rows, per step.
        state: The training state after the last step.
        facts: Sizes of this rank's tensors, and the number of padding tokens as "filler".
        gradients: Unsharded gradients of the first step, after clipping.
    """

    losses: list[float]
    grad_norms: list[float]
    lrs: list[float]
    initial: dict[str, Tensor]
    final: dict[str, Tensor]
    sample_ids: list[list[int]]
    state: dict[str, int]
    facts: dict[str, Any]
    gradients: dict[str, Tensor]


def make_run(rank: int, config: Config) -> trainer.Run:
    """Build the run of one rank, in an existing process group."""
    return trainer.build(
        config, World(rank, torch.distributed.get_world_size(), rank, torch.device("cpu"))
    )


def whole(run: trainer.Run) -> dict[str, Tensor]:
    """Return copies of all weights of the run, unsharded, on every rank. Collective."""
    return {name: to_full(p.detach()).clone() for name, p in run.runner.parameters().items()}


def train_steps(rank: int, config: Config, steps: int) -> Result:
    """Train a number of steps as one rank, without the files of a complete run."""
    run = make_run(rank, config)
    initial = whole(run)
    losses = []
    norms = []
    lrs = []
    ids = []
    pull = run.dataloader.__next__
    padding: list[int] = []

    class Recorded:
        def __getattr__(self, name: str) -> Any:
            return getattr(stream, name)

        def __next__(self) -> Any:
            batch = pull()
            # batches of row tasks have no lengths_B
            if getattr(batch, "lengths_B", None) is not None:
                padding.append(int((batch.tokens_BT.size(1) - batch.lengths_B).sum()))
            ids[-1].extend(batch.sample_ids_B.tolist())
            return batch

    stream, run.dataloader = run.dataloader, Recorded()  # type: ignore[assignment]
    gradients: dict[str, Tensor] = {}
    update = run.runner.update

    def keep_gradients(optimizer: torch.optim.Optimizer) -> None:
        if not gradients:
            parameters = run.runner.parameters().items()
            gradients.update(
                {name: to_full(p.grad).clone() for name, p in parameters if p.grad is not None}
            )
        update(optimizer)

    run.runner.update = keep_gradients  # type: ignore[method-assign]
    for _ in range(steps):
        ids.append([])
        outcome = trainer.step(run)
        loss = (
            run.mesh.sum(outcome.loss_sum.double(), over=("pp", *LOSS_AXES)).item()
            / outcome.global_tokens
        )
        losses.append(loss)
        norms.append(outcome.grad_norm)
        lrs.append(outcome.lr)
    states = [tensor for state in run.optimizer.state.values() for tensor in state.values()]
    facts = {
        "optimizer_bytes": sum(local_tensor(tensor).nbytes for tensor in states),
        "local_numel": sum(
            local_tensor(parameter).numel() for parameter in run.runner.parameters().values()
        ),
        "num_params": run.num_params,
        "filler": sum(padding),
    }
    return Result(
        losses, norms, lrs, initial, whole(run), ids, run.state.to_dict(), facts, gradients
    )


def run_tiny(num_ranks: int, config: Config, steps: int = STEPS) -> list[Result]:
    """Train a number of steps in forked ranks. Return the results of all ranks."""
    return run_ranks(num_ranks, train_steps, config, steps)


@functools.cache
def reference(steps: int = STEPS, num_layers: int = LAYERS) -> Result:
    """Return the results to compare every mesh with: one process, no accumulation, float32."""
    model = {"overrides": {"num_layers": num_layers}}
    return run_tiny(1, tiny_config(model=model, training={"local_batch_size": 8}), steps)[0]


def assert_same_numbers(
    result: Result, expected: Result, loss: float = 1e-5, grad_norm: float = 1e-5
) -> None:
    """Assert equal initial weights, losses within ``loss``, and gradient norms within a relative ``grad_norm``."""
    assert result.initial.keys() == expected.initial.keys()
    for name, weight in expected.initial.items():
        assert torch.equal(result.initial[name], weight), f"initial {name} differs"
    assert len(result.losses) == len(expected.losses)
    for step, (actual, wanted) in enumerate(zip(result.losses, expected.losses, strict=True), 1):
        assert abs(actual - wanted) <= loss, f"step {step}: loss {actual} is not {wanted}"
    for step, (actual, wanted) in enumerate(
        zip(result.grad_norms, expected.grad_norms, strict=True), 1
    ):
        assert abs(actual - wanted) <= grad_norm * wanted, (
            f"step {step}: gradient norm {actual} is not {wanted}"
        )


@dataclass(frozen=True)
class Ended:
    """Results of a complete run, as one rank saw them: values of each step, the final state, and its error."""

    losses: list[float]
    grad_norms: list[float]
    lrs: list[float]
    sample_ids: list[list[int]]
    state: dict[str, int]
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    scaler: dict[str, float]
    error: ShardtrainError | None


def train_whole(rank: int, config: Config, stop_after: int | None = None) -> Ended:
    """Run ``train.train`` with its log, files and checkpoints, as one rank in an existing process group.

    ``stop_after`` ends the run after that many steps, as a kill would: without saving. A ShardtrainError is part of the
    result, and other errors propagate. The call patches functions of the trainer until it returns.
    """
    runs: list[trainer.Run] = []
    losses = []
    norms = []
    lrs = []
    ids = []
    size = torch.distributed.get_world_size()

    def build(*arguments: Any) -> trainer.Run:
        runs.append(originals["build"](*arguments))
        return runs[0]

    def step(run: trainer.Run) -> trainer.Outcome | None:
        if run.state.step == stop_after:
            raise _Killed
        ids.append([])
        outcome = originals["step"](run)
        if outcome is None:  # the data ended, so there was no step
            ids.pop()
            return None
        loss = run.mesh.sum(outcome.loss_sum.double(), over=("pp", *LOSS_AXES)).item() / max(
            1, outcome.global_tokens
        )
        losses.append(loss)
        norms.append(outcome.grad_norm)
        lrs.append(outcome.lr)
        return outcome

    def pull(stream: data.DataLoader) -> data.Batch:
        batch = originals["pull"](stream)
        if ids:  # ids is empty while a resumed run repeats a validation
            ids[-1].extend(batch.sample_ids_B.tolist())
        return batch

    originals: dict[str, Any] = {
        "build": trainer.build,
        "step": trainer.step,
        "pull": data.DataLoader.__next__,
    }
    trainer.build, trainer.step, data.DataLoader.__next__ = build, step, pull  # type: ignore[method-assign]
    log.setup(rank, size, Path(config.job.dump_folder), config.metrics.save_log_file, console=False)
    error = None
    try:
        trainer.train(Loaded(config), World(rank, size, rank, torch.device("cpu")))
    except ShardtrainError as raised:
        error = raised
    except _Killed:
        pass
    finally:
        trainer.build, trainer.step, data.DataLoader.__next__ = originals.values()  # type: ignore[method-assign]
        log.reset()
    if not runs or isinstance(error, PeerError):  # unsharding the weights needs all ranks
        return Ended(losses, norms, lrs, ids, {}, {}, {}, {}, error)
    run = runs[0]
    states = optim.state_tensors(run.optimizer, run.runner.optimizer_parameters().items())
    optimizer = {name: to_full(tensor.detach()).clone() for name, tensor in states.items()}
    scaler = dict(run.scaler.state()) if run.scaler else {}
    return Ended(losses, norms, lrs, ids, run.state.to_dict(), whole(run), optimizer, scaler, error)


class _Killed(Exception):
    """Raised between two steps to end a run."""


def assert_bitwise(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert the same names and equal tensors."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), f"{name} differs"
