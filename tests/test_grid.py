"""Every model family on every kind of mesh and schedule has the numbers of one process.

Three steps in float32: losses to 1e-5, each gradient to 1e-5 of its norm, gradient norms to 1e-4, initial weights
bitwise, weights after the steps to 1e-6. Sums in another order differ by about 1e-7 of their size. One launch of ranks
runs all meshes of its size, since starting ranks costs more than a step.
"""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny import Result, run_tiny, tiny_config, train_steps

from shardtrain.config.schema import Config

STEPS = 3

COMMON = {"vocab_size": 512, "dim": 64, "num_layers": 4, "num_heads": 4}
GROUPED = {**COMMON, "num_kv_heads": 2, "head_dim": 16}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
# family -> flavor and the fields that make it tiny. Ends are not tied, which a pipeline could not be: that has a law of
# its own. Seeds and sizes are such that no token has two experts with scores alike to rounding.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("debugmodel", {**GROUPED, "ffn_dim": 128}),
    # with a window that ends within and across the parts of a sequence that ranks hold
    "mistral": ("debugmodel", {**GROUPED, "ffn_dim": 128, "sliding_window": 21}),
    "qwen2": ("debugmodel", {**GROUPED, "ffn_dim": 128, "tied_embeddings": False}),
    "neox": ("debugmodel", {**COMMON, "head_dim": 16, "ffn_dim": 128}),
    "qwen3": ("debugmodel", {**GROUPED, "ffn_dim": 128, "tied_embeddings": False}),
    "qwen3_moe": ("debugmodel_moe", {**GROUPED, "moe_ffn_dim": 48, "num_experts": 8, "top_k": 2}),
    "mixtral": ("debugmodel", {**GROUPED, "moe_ffn_dim": 48, "num_experts": 4}),
    "deepseek_v3": (
        "671B",
        {
            **COMMON,
            **LATENT,
            "num_dense_layers": 1,
            "ffn_dim": 128,
            "moe_ffn_dim": 32,
            "num_experts": 8,
            "top_k": 2,
            "num_groups": 4,
            "top_groups": 2,
            "init_std": 0.1,
        },
    ),
}
MIXTURES = ("qwen3_moe", "mixtral", "deepseek_v3")
# These are built of the same parts as others: they run on the meshes where a window, biases or a layer of their own
# matter, and on all of them with SHARDTRAIN_ALL_MESHES=1.
RELATIVES = {
    "mistral": ("fsdp", "tp", "cp gather", "cp ring", "cp ulysses", "tp x cp"),
    "qwen2": ("tp", "fsdp x tp"),
    "neox": ("fsdp", "tp", "cp ring", "pp 1F1B", "fsdp x tp"),
}
ALL_MESHES = bool(os.environ.get("SHARDTRAIN_ALL_MESHES"))

DDP, TP, CP, PP, EP = (
    {f"{axis}_degree": 2}
    for axis in (
        "data_parallel_replicate",
        "tensor_parallel",
        "context_parallel",
        "pipeline_parallel",
        "expert_parallel",
    )
)
RING = {"context_parallel_rotate_method": "alltoall"}
EVEN = {"pipeline_parallel_first_stage_less_layers": 0, "pipeline_parallel_last_stage_less_layers": 0}


def piped(schedule: str) -> dict[str, Any]:
    return {**PP, **EVEN, "pipeline_parallel_schedule": schedule}


# number of ranks -> mesh -> keys of [parallelism]
MESHES: dict[int, dict[str, dict[str, Any]]] = {
    1: {"accumulation": {}},
    2: {
        "ddp": DDP,
        "fsdp": {},
        "zero-1": {**DDP, "shard_optimizer_states": True},
        "tp": TP,
        "cp gather": CP,
        "cp ring": {**CP, **RING},
        "cp ulysses": {**CP, "context_parallel_method": "ulysses"},
        "pp 1F1B": piped("1F1B"),
        "pp GPipe": piped("GPipe"),
        "pp Interleaved1F1B": piped("Interleaved1F1B"),
        "pp LoopedBFS": piped("LoopedBFS"),
        "pp InterleavedZeroBubble": piped("InterleavedZeroBubble"),
        "pp ZBVZeroBubble": piped("ZBVZeroBubble"),
        "pp DualPipeV": piped("DualPipeV"),
    },
    4: {
        "fsdp 4": {},
        "hsdp": DDP,
        "fsdp x tp": TP,
        "fsdp x cp": {**CP, **RING},
        "fsdp x pp": piped("1F1B"),
        "tp x pp": {**TP, **piped("Interleaved1F1B")},
        "tp x cp": {**TP, **CP},
        "cp x pp": {**CP, **piped("1F1B")},
    },
    8: {
        "fsdp x tp x pp": {**TP, **piped("1F1B")},
        "hsdp x tp": {**DDP, **TP},
        "fsdp x cp x tp": {**CP, **TP},
        "fsdp x cp x pp": {**CP, **piped("ZBVZeroBubble")},
    },
}
EXPERT_MESHES: dict[int, dict[str, dict[str, Any]]] = {
    2: {"ep": EP},
    4: {
        "ep 4": {"expert_parallel_degree": 4},
        "fsdp x ep": EP,
        "tp x ep": {**TP, **EP},
        "pp x ep": {**EP, **piped("1F1B")},
    },
    8: {"fsdp x tp x pp x ep": {**TP, **EP, **piped("1F1B")}},
}


def meshes_of(family: str, num_ranks: int) -> dict[str, dict[str, Any]]:
    meshes = MESHES[num_ranks] | (EXPERT_MESHES.get(num_ranks, {}) if family in MIXTURES else {})
    if ALL_MESHES or family not in RELATIVES:
        return meshes
    return {name: meshes[name] for name in RELATIVES[family] if name in meshes}


CASES = [(family, num_ranks) for family in FAMILIES for num_ranks in MESHES if meshes_of(family, num_ranks)]


def config(family: str, parallelism: dict[str, Any], local_batch_size: int = 2) -> Config:
    tiny = tiny_config(training={"local_batch_size": local_batch_size}, parallelism=parallelism)
    flavor, overrides = FAMILIES[family]
    return replace(tiny, model=replace(tiny.model, name=family, flavor=flavor, overrides=overrides))


@functools.cache
def one_process(family: str) -> Result:
    return run_tiny(1, config(family, {}, local_batch_size=8), STEPS)[0]


def run_meshes(rank: int, family: str, meshes: dict[str, dict[str, Any]]) -> dict[str, Result]:
    return {name: train_steps(rank, config(family, parallelism), STEPS) for name, parallelism in meshes.items()}


def differences(result: Result, expected: Result) -> list[str]:
    """Every way in which a rank's numbers are not those of one process."""
    found = [f"initial {name}" for name, w in result.initial.items() if not torch.equal(w, expected.initial[name])]
    for step in range(STEPS):
        if not abs(result.losses[step] - expected.losses[step]) <= 1e-5:
            found.append(f"loss of step {step + 1}: {result.losses[step]} for {expected.losses[step]}")
        if not abs(result.grad_norms[step] - expected.grad_norms[step]) <= 1e-4:
            found.append(f"norm of step {step + 1}: {result.grad_norms[step]} for {expected.grad_norms[step]}")
    for name, gradient in result.gradients.items():
        theirs = expected.gradients[name]
        if not (gradient - theirs).norm() <= 1e-5 * theirs.norm() + 1e-10:
            found.append(f"gradient of {name}: off by {(gradient - theirs).norm() / theirs.norm():.1e} of its norm")
    for name, weight in result.final.items():
        if not (weight - expected.final[name]).abs().max() <= 1e-6:
            found.append(f"final {name}: off by {(weight - expected.final[name]).abs().max():.1e}")
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("family", "num_ranks"), CASES)
def test_a_family_has_the_numbers_of_one_process_on_all_meshes(family: str, num_ranks: int) -> None:
    meshes = meshes_of(family, num_ranks)
    expected = one_process(family)
    held: dict[str, set[str]] = {}
    for rank, results in enumerate(run_ranks(num_ranks, run_meshes, family, meshes)):
        for name, result in results.items():
            assert differences(result, expected) == [], f"{family} on {name}, rank {rank}"
            held.setdefault(name, set()).update(result.final)
    for name, weights in held.items():  # stages hold some of the weights each, and all of them together
        assert weights == expected.final.keys(), name


def test_a_stage_without_experts_joins_their_mesh() -> None:
    # the first layers of DeepSeek-V3 are dense, so a stage may hold no experts while others make their groups
    def dense_first(parallelism: dict[str, Any], local_batch_size: int = 2) -> Config:
        tiny = config("deepseek_v3", parallelism, local_batch_size)
        overrides = {**tiny.model.overrides, "num_dense_layers": 2}
        return replace(tiny, model=replace(tiny.model, overrides=overrides))

    expected = run_tiny(1, dense_first({}, local_batch_size=8), STEPS)[0]
    for result in run_tiny(4, dense_first({**EP, **piped("1F1B")}), STEPS):
        assert differences(result, expected) == []
