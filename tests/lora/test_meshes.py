"""Adapters train equally on every mesh, and the frozen weights stay bitwise unchanged.

The reference is one process. AdamW's eps is large, see ``tiny.py``. Gradients of the first steps are small, because
lora_b starts at zero, so the bounds of ``assert_same_numbers`` hold easily.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tiers import cases
from tiny import Result, assert_same_numbers, run_tiny, tiny_config

from shardtrain.config.schema import Config
from shardtrain.lora.linear import is_adapter

STEPS = 10
MESHES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "fsdp2": (2, {}, {}),
    "replicas with split states": (
        2,
        {"data_parallel_replicate_degree": 2, "shard_optimizer_states": True},
        {},
    ),
    "tp2": (2, {"tensor_parallel_degree": 2}, {}),
    "cp2": (2, {"context_parallel_degree": 2}, {}),
    "pp2": (
        2,
        {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"},
        {"local_batch_size": 4},
    ),
    "fsdp2 tp2, recomputed": (4, {"tensor_parallel_degree": 2}, {}),
    "tp2, dora": (2, {"tensor_parallel_degree": 2}, {}),
    "fsdp2, dora": (2, {}, {}),
    "pp2, dora": (
        2,
        {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"},
        {"local_batch_size": 4},
    ),
    "fsdp2 tp2, recomputed, dora": (4, {"tensor_parallel_degree": 2}, {}),
}


def config(
    parallelism: dict[str, Any], training: dict[str, Any], mode: str = "none", **lora: Any
) -> Config:
    targets = ["q_proj", "layers.*.attn.w[kvo]", "w2", "gate_proj", "head"]
    return tiny_config(
        model={"overrides": {"num_layers": 2}},
        parallelism=parallelism,
        training=training,
        activation_checkpoint={"mode": mode},
        lora={
            "enable": True,
            "rank": 4,
            "alpha": 8.0,
            "random_base": True,
            "target_modules": targets,
            **lora,
        },
        optimizer={"lr": 3e-2, "eps": 1e-3},
    )


@functools.cache
def one_process(use_dora: bool = False) -> Result:
    return run_tiny(1, config({}, {"local_batch_size": 8}, use_dora=use_dora), STEPS)[0]


FIRST = ("fsdp2", "tp2", "pp2", "tp2, dora")


@pytest.mark.parametrize(
    "mesh", cases(FIRST, nightly=[mesh for mesh in MESHES if mesh not in FIRST])
)
def test_adapters_and_frozen_weights_are_equal_on_every_mesh(mesh: str) -> None:
    ranks, parallelism, training = MESHES[mesh]
    mode = "full" if "recomputed" in mesh else "none"
    dora = "dora" in mesh
    results = run_tiny(ranks, config(parallelism, training, mode, use_dora=dora), STEPS)
    expected = one_process(dora)

    initial_weights: dict[str, torch.Tensor] = {}
    for result in results:
        initial_weights |= result.initial
        for name, weight in result.initial.items():
            assert torch.equal(weight, expected.initial[name]), f"initial {name} differs"
            assert torch.equal(weight, result.final[name]) != is_adapter(name), name
        # float32 sums in a different order
        assert result.losses == pytest.approx(expected.losses, abs=1e-5)
        assert result.grad_norms == pytest.approx(expected.grad_norms, abs=1e-4)
        assert all(is_adapter(name) for name in result.gradients)

    assert initial_weights.keys() == expected.initial.keys()
    if "pp" not in mesh:
        assert_same_numbers(results[0], expected)


def test_the_reference_learns_and_freezes() -> None:
    expected = one_process()
    assert expected.losses[-1] < expected.losses[0] - 0.5
    for name, weight in expected.initial.items():
        assert torch.equal(weight, expected.final[name]) != is_adapter(name), name
    for name, weight in expected.initial.items():
        if name.endswith("lora_b"):
            assert not weight.any(), name

    # Only trained weights have Adam states: two float32 numbers each, and step counts.
    trained = sum(weight.numel() for name, weight in expected.initial.items() if is_adapter(name))
    step_counts_bytes = 4 * 2 * len(expected.initial)
    assert expected.facts["optimizer_bytes"] < 2 * 4 * trained + step_counts_bytes
