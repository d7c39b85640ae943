"""First steps of tiny ``transformers`` networks on a mesh, to compare with one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from hf_architectures import hf_folder, layered
from tiny import assert_bitwise, make_run, tiny_config, whole
from torch import Tensor

from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config.schema import Config
from shardtrain.ops.dtensor import to_full
from shardtrain.train import trainer
from shardtrain.train.resume import resume


def deep_folder(name: str) -> Path:
    """Return the folder of an architecture with four layers."""
    changes = layered(name, 4)
    return hf_folder(
        name,
        **{
            key: tuple(value) if isinstance(value, list) else value
            for key, value in changes.items()
        },
    )


NOT_LOADED = ("qwen3_5_moe", "kimi_linear")
"""Architectures whose saved names only ``transformers`` can convert, so their random weights are trained."""


def hf_tiny(path: Path, output: Path, **sections: Any) -> Config:
    """Return the tiny configuration of a folder, which loads its weights."""
    training = {"seq_len": 32, "max_norm": 1e9, "local_batch_size": 4, "global_batch_size": 4}
    load = (
        {}
        if path.name in NOT_LOADED
        else {"initial_load_path": str(path), "initial_load_in_hf": True}
    )
    merged: dict[str, Any] = {
        **sections,
        "job": {"dump_folder": str(output)},
        "training": {**training, **sections.get("training", {})},
        "checkpoint": {"enable": True, **load, **sections.get("checkpoint", {})},
    }
    config = tiny_config(**merged)
    model = dataclasses.replace(
        config.model, name="transformers", flavor="folder", overrides={"path": str(path)}
    )
    return dataclasses.replace(config, model=model)


@dataclasses.dataclass(frozen=True)
class FirstStep:
    """Initial weights without a checkpoint, and the first step with the weights of a folder."""

    initial: dict[str, Tensor]
    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]


def first_step(rank: int, config: Config) -> FirstStep:
    run = make_run(rank, config)
    initial = whole(run)
    checkpoints = Checkpoints(config)
    resume(run, checkpoints)
    checkpoints.close()
    gradients: dict[str, Tensor] = {}
    update = run.runner.update

    def keep(optimizer: torch.optim.Optimizer) -> None:
        for name, parameter in run.runner.parameters().items():
            if parameter.grad is not None:
                gradients[name] = to_full(parameter.grad).clone()
        update(optimizer)

    run.runner.update = keep  # type: ignore[method-assign]
    outcome = trainer.step(run)
    assert outcome is not None
    loss = run.mesh.sum(
        outcome.loss_sum.double(), over=("pp", "dp_replicate", "dp_shard", "cp")
    ).item()
    return FirstStep(initial, loss / outcome.global_tokens, outcome.grad_norm, gradients)


def piped(degree: int, schedule: str, **more: Any) -> dict[str, Any]:
    return {
        "pipeline_parallel_degree": degree,
        "pipeline_parallel_schedule": schedule,
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
        **more,
    }


def difference(results: list[FirstStep], expected: FirstStep) -> float:
    """Return the largest relative difference of loss and gradients, after checking names and initial weights.

    A gradient is compared with its own norm, or with a hundredth of the largest norm of a gradient if that is more.
    The result is NaN if any loss or gradient is NaN.
    """
    differences: list[float] = []
    names: set[str] = set()
    largest_norm = max(float(gradient.norm()) for gradient in expected.gradients.values())
    for result in results:
        names |= result.initial.keys()
        for name, weight in result.initial.items():
            assert_bitwise({name: weight}, {name: expected.initial[name]})

        differences.append(abs(result.loss - expected.loss) / expected.loss)
        differences.append(abs(result.grad_norm - expected.grad_norm) / expected.grad_norm)

        assert result.gradients.keys() == result.initial.keys() & expected.gradients.keys()
        for name, gradient in result.gradients.items():
            expected_gradient = expected.gradients[name]
            # Gradients of decay rates, for example, are small differences of large sums
            size = max(float(expected_gradient.norm()), 1e-2 * largest_norm)
            differences.append(float((gradient - expected_gradient).norm()) / size)
    # Python's max skips NaN, and that of torch returns it.
    return float(torch.tensor(differences, dtype=torch.float64).max())
