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
from shardtrain.ops.dtensor import to_full
from shardtrain.train import trainer
from shardtrain.utils import log
from shardtrain.utils.errors import PeerError, ShardtrainError

# As many as a wrong update, a wrong state of the optimizer and a wrong rate need to show
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

LAYERS = 2
"""Of the runs here: time goes to the number of layers, whatever their width, and most laws are about all alike."""


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
        config = dataclasses.replace(config, **{name: dataclasses.replace(getattr(config, name), **merged)})
    return config


def deep_config(**sections: dict[str, Any]) -> Config:
    """The tiny run with all four layers, for laws that count layers or cut the model into more than two stages."""
    model = sections.pop("model", {})
    overrides = {"num_layers": SHAPE["num_layers"], **model.get("overrides", {})}
    return tiny_config(model={**model, "overrides": overrides}, **sections)


def shallow_config(**sections: dict[str, Any]) -> Config:
    """The tiny run with one layer, or two where they are stages: for laws about whole runs, their data and files."""
    model = sections.pop("model", {})
    stages = sections.get("parallelism", {}).get("pipeline_parallel_degree", 1)
    overrides = {"num_layers": stages, **model.get("overrides", {})}
    return tiny_config(model={**model, "overrides": overrides}, **sections)


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
    gradients: dict[str, Tensor]
    """Of the first step, whole and clipped."""


def make_run(rank: int, config: Config) -> trainer.Run:
    """Build the run of one rank, whose process group exists."""
    return trainer.build(config, World(rank, torch.distributed.get_world_size(), rank, torch.device("cpu")))


def whole(run: trainer.Run) -> dict[str, Tensor]:
    """All weights of the run, whole, on every rank."""
    return {name: to_full(p.detach()).clone() for name, p in run.runner.parameters().items()}


def train_steps(rank: int, config: Config, steps: int) -> Result:
    """Train some steps as one rank."""
    run = make_run(rank, config)
    initial, losses, norms, lrs, ids = whole(run), [], [], [], []
    pull = run.dataloader.__next__
    filler: list[int] = []

    class Recorded:
        def __getattr__(self, name: str) -> Any:
            return getattr(stream, name)

        def __next__(self) -> Any:
            batch = pull()
            if getattr(batch, "lengths_B", None) is not None:  # batches of tasks have columns of their own
                filler.append(int((batch.tokens_BT.size(1) - batch.lengths_B).sum()))
            ids[-1].extend(batch.sample_ids_B.tolist())
            return batch

    stream, run.dataloader = run.dataloader, Recorded()  # type: ignore[assignment]
    gradients: dict[str, Tensor] = {}
    update = run.runner.update

    def keep_gradients(optimizer: torch.optim.Optimizer) -> None:
        if not gradients:
            parameters = run.runner.parameters().items()
            gradients.update({name: to_full(p.grad).clone() for name, p in parameters if p.grad is not None})
        update(optimizer)

    run.runner.update = keep_gradients  # type: ignore[method-assign]
    for _ in range(steps):
        ids.append([])
        outcome = trainer.step(run)
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
    facts["filler"] = sum(filler)
    return Result(losses, norms, lrs, initial, whole(run), ids, run.state.to_dict(), facts, gradients)


def run_tiny(num_ranks: int, config: Config, steps: int = STEPS) -> list[Result]:
    """The results of all ranks."""
    return run_ranks(num_ranks, train_steps, config, steps)


@functools.cache
def reference(steps: int = STEPS, num_layers: int = LAYERS) -> Result:
    """One process, no accumulation, float32: what every mesh is compared with."""
    model = {"overrides": {"num_layers": num_layers}}
    return run_tiny(1, tiny_config(model=model, training={"local_batch_size": 8}), steps)[0]


def assert_same_numbers(result: Result, expected: Result, loss: float = 1e-5, grad_norm: float = 1e-5) -> None:
    """Initial weights bitwise, losses of each step to rounding, norms to ``grad_norm`` of them."""
    assert result.initial.keys() == expected.initial.keys()
    for name, weight in expected.initial.items():
        assert torch.equal(result.initial[name], weight), f"initial {name} differs"
    assert len(result.losses) == len(expected.losses)
    for step, (mine, theirs) in enumerate(zip(result.losses, expected.losses, strict=True), 1):
        assert abs(mine - theirs) <= loss, f"step {step}: loss {mine} is not {theirs}"
    for step, (mine, theirs) in enumerate(zip(result.grad_norms, expected.grad_norms, strict=True), 1):
        assert abs(mine - theirs) <= grad_norm * theirs, f"step {step}: gradient norm {mine} is not {theirs}"


@dataclass(frozen=True)
class Ended:
    """A whole run as one rank saw it: numbers of each step, what it left, and the error that ended it."""

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
    """Run ``train.train`` with its log, files and checkpoints, as one rank whose process group exists.

    ``stop_after`` ends the run when that many steps of the run are done, as a kill would: nothing is saved for it. A
    ShardtrainError is given back; all others are raised. Patches what it watches, for the length of the call.
    """
    runs: list[trainer.Run] = []
    losses, norms, lrs, ids = [], [], [], []
    size = torch.distributed.get_world_size()

    def build(*arguments: Any) -> trainer.Run:
        runs.append(originals["build"](*arguments))
        return runs[0]

    def step(run: trainer.Run) -> trainer.Outcome | None:
        if run.state.step == stop_after:
            raise _Killed
        ids.append([])
        outcome = originals["step"](run)
        if outcome is None:  # the data have ended
            ids.pop()
            return None
        loss = run.mesh.sum(outcome.loss_sum.double(), over=("pp", *LOSS_AXES)).item() / max(1, outcome.global_tokens)
        losses.append(loss)
        norms.append(outcome.grad_norm)
        lrs.append(outcome.lr)
        return outcome

    def pull(stream: data.DataLoader) -> data.Batch:
        batch = originals["pull"](stream)
        if ids:  # else the run repeats a validation before its first step
            ids[-1].extend(batch.sample_ids_B.tolist())
        return batch

    originals: dict[str, Any] = {"build": trainer.build, "step": trainer.step, "pull": data.DataLoader.__next__}
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
    if not runs or isinstance(error, PeerError):  # nothing can be gathered without the other ranks
        return Ended(losses, norms, lrs, ids, {}, {}, {}, {}, error)
    run = runs[0]
    states = optim.state_tensors(run.optimizer, run.runner.optimizer_parameters().items())
    optimizer = {name: to_full(tensor.detach()).clone() for name, tensor in states.items()}
    scaler = dict(run.scaler.state()) if run.scaler else {}
    return Ended(losses, norms, lrs, ids, run.state.to_dict(), whole(run), optimizer, scaler, error)


class _Killed(Exception):
    """Ends a run between two steps."""


def assert_bitwise(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """The same names and the same bits."""
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor), f"{name} differs"
