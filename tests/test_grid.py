"""Every model family on every kind of mesh and schedule has the same results as one process.

Two steps in float32 agree: losses to 1e-5, each gradient to 1e-5 of its norm, gradient norms to a relative 1e-6,
initial weights bitwise, and weights after the steps to 1e-6. Sums in another order differ by a relative 1e-7. The time
of a case depends on the number of layers and passes, and on PyTorch's warm-up on a mesh. Therefore a case has only two
steps (the second one tests an update), two micro-batches and one layer per stage, and one launch of ranks runs many
cases.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiers import cases
from tiny import QWEN3_NEXT, Result, run_tiny, tiny_config, train_steps

from shardtrain.config.schema import Config

STEPS = 2
BATCH = 4

COMMON = {"vocab_size": 512, "dim": 64, "num_heads": 4}
GROUPED = {**COMMON, "num_kv_heads": 2, "head_dim": 16}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
# For each family, the flavor and the fields that make it tiny. Embeddings are tied if the small flavors of a family tie
# them. Seeds and sizes are chosen such that no token has two experts with equal scores up to rounding.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("debugmodel", {**GROUPED, "ffn_dim": 128}),
    # The window of 21 tokens crosses the boundaries of context-parallel parts.
    "mistral": ("debugmodel", {**GROUPED, "ffn_dim": 128, "sliding_window": 21}),
    "qwen2": ("debugmodel", {**GROUPED, "ffn_dim": 128, "tied_embeddings": True}),
    "neox": ("debugmodel", {**COMMON, "head_dim": 16, "ffn_dim": 128}),
    "qwen3": ("debugmodel", {**GROUPED, "ffn_dim": 128, "tied_embeddings": True}),
    "qwen3_moe": ("debugmodel_moe", {**GROUPED, "moe_ffn_dim": 48, "num_experts": 8, "top_k": 2}),
    # The first of two layers is recurrent. Its blocks of tokens cross the boundaries of context-parallel parts.
    "qwen3_next": ("debugmodel", {**GROUPED, **QWEN3_NEXT}),
    "mixtral": ("debugmodel", {**GROUPED, "moe_ffn_dim": 48, "num_experts": 4}),
    # The second layer has experts and no RoPE. Attention chunks cross the boundaries of context-parallel parts.
    "llama4": (
        "debugmodel",
        {
            **GROUPED,
            "ffn_dim": 128,
            "moe_ffn_dim": 48,
            "num_experts": 8,
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 21,
            "floor_scale": 9,
        },
    ),
    "gpt_oss": (
        "debugmodel",
        {
            **GROUPED,
            "moe_ffn_dim": 48,
            "num_experts": 8,
            "top_k": 2,
            "sliding_window": 21,
            "init_std": 0.1,
        },
    ),
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
MIXTURES = ("qwen3_moe", "qwen3_next", "mixtral", "llama4", "gpt_oss", "deepseek_v3")
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
EVEN = {
    "pipeline_parallel_first_stage_less_layers": 0,
    "pipeline_parallel_last_stage_less_layers": 0,
}


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


ALL = {
    num_ranks: {**meshes, **EXPERT_MESHES.get(num_ranks, {})}
    for num_ranks, meshes in MESHES.items()
}
CASES = [(num_ranks, mesh) for num_ranks, meshes in ALL.items() for mesh in meshes]

# The default tier covers each axis and each pair of axes with one family, and each family with one axis and one pair.
# One launch of ranks runs all meshes of a group, because PyTorch's warm-up on the first mesh is half of the cost of a
# mesh. All other cases, including products of three axes, are nightly.
FIRST: dict[tuple[int, str], dict[str, str]] = {
    (2, "data"): {"ddp": "mixtral", "fsdp": "neox", "zero-1": "qwen3_moe"},
    (2, "layers"): {"tp": "qwen2", "ep": "deepseek_v3"},
    (2, "context"): {"cp gather": "llama4", "cp ring": "gpt_oss", "cp ulysses": "mistral"},
    (2, "pipeline"): {
        "pp 1F1B": "qwen3",
        "pp GPipe": "neox",
        "pp Interleaved1F1B": "deepseek_v3",
        "pp LoopedBFS": "mistral",
        "pp InterleavedZeroBubble": "qwen2",
        "pp ZBVZeroBubble": "llama3",
        "pp DualPipeV": "gpt_oss",
    },
    (2, "recurrence"): {"tp": "qwen3_next", "cp gather": "qwen3_next"},
    (4, "recurrence"): {"cp x pp": "qwen3_next"},
    (4, "data"): {"hsdp": "llama3", "fsdp x tp": "neox", "fsdp x ep": "qwen3_moe"},
    (4, "context"): {"fsdp x cp": "llama4", "tp x cp": "mistral", "cp x pp": "gpt_oss"},
    (4, "layers"): {
        "fsdp x pp": "qwen3",
        "tp x pp": "qwen2",
        "tp x ep": "mixtral",
        "pp x ep": "deepseek_v3",
    },
}
DEFAULT = {(num_ranks, *pair) for (num_ranks, _), group in FIRST.items() for pair in group.items()}


def families_of(num_ranks: int, mesh: str) -> list[str]:
    return list(FAMILIES if mesh in MESHES[num_ranks] else MIXTURES)


OTHERS = {
    (num_ranks, mesh): [
        name for name in families_of(num_ranks, mesh) if (num_ranks, mesh, name) not in DEFAULT
    ]
    for num_ranks, mesh in CASES
}
"""Families of the nightly cases, by number of ranks and mesh."""


def config(family: str, parallelism: dict[str, Any], local_batch_size: int = BATCH) -> Config:
    tiny = tiny_config(
        training={"local_batch_size": local_batch_size, "global_batch_size": BATCH},
        parallelism=parallelism,
    )
    flavor, overrides = FAMILIES[family]
    overrides = {**overrides, "num_layers": num_layers(parallelism)}
    return replace(tiny, model=replace(tiny.model, name=family, flavor=flavor, overrides=overrides))


def num_layers(parallelism: dict[str, Any]) -> int:
    """Return one layer per stage. Some schedules have two stages per rank."""
    return 4 if "pipeline_parallel_degree" in parallelism else 2


def on_mesh(family: str, num_ranks: int, parallelism: dict[str, Any]) -> Config:
    """Return a configuration with two micro-batches per step, or one micro-batch on four data ranks."""
    degrees = [
        parallelism.get(f"{axis}_degree", 1) for axis in ("tensor_parallel", "context_parallel")
    ]
    stages = parallelism.get("pipeline_parallel_degree", 1)
    data_ranks = num_ranks // (math.prod(degrees) * stages)
    return config(family, parallelism, 2 if data_ranks == 1 or stages > 1 else 1)


IN_BFLOAT16 = [
    ("qwen3_moe", 2, {"pipeline_parallel_degree": 2}),
    ("llama3", 2, {"tensor_parallel_degree": 2}),
    ("qwen3_moe", 2, {"expert_parallel_degree": 2}),
]


@pytest.mark.parametrize(
    ("family", "num_ranks", "parallelism"),
    cases(
        IN_BFLOAT16[:1], nightly=[*IN_BFLOAT16[1:], ("llama3", 2, {"pipeline_parallel_degree": 2})]
    ),
)
def test_gradient_norm_of_bfloat16_weights_equals_one_process(
    family: str, num_ranks: int, parallelism: dict[str, Any]
) -> None:
    """bfloat16 rounds each gradient to 8 bits, but these errors mostly cancel in the norm.

    Measured differences are below 3e-4. A gradient counted twice, or a missing sum over ranks, is at least 1e-2.
    """
    norms = []
    for ranks, degrees, rows in ((1, {}, BATCH), (num_ranks, parallelism, 2)):
        tiny = config(family, degrees, rows)
        model = replace(tiny.model, overrides={**tiny.model.overrides, "num_layers": 2})
        training = replace(tiny.training, dtype="bfloat16", mixed_precision_param="bfloat16")
        (result, *_) = run_tiny(ranks, replace(tiny, model=model, training=training), 2)
        norms.append(result.grad_norms)

    assert norms[1] == pytest.approx(norms[0], rel=5e-4)


@functools.cache
def one_process(family: str, num_layers: int) -> Result:
    unsharded = config(family, {})
    overrides = {**unsharded.model.overrides, "num_layers": num_layers}
    return run_tiny(
        1, replace(unsharded, model=replace(unsharded.model, overrides=overrides)), STEPS
    )[0]


def run_pairs(
    rank: int, num_ranks: int, pairs: list[tuple[str, str]]
) -> dict[tuple[str, str], Result]:
    """Train all pairs of mesh and family, one after another, as one rank."""
    results = {}
    for mesh, family in pairs:
        results[mesh, family] = train_steps(
            rank, on_mesh(family, num_ranks, ALL[num_ranks][mesh]), STEPS
        )
    return results


def differences(result: Result, expected: Result) -> list[str]:
    """Describe every difference between the results of a rank and those of one process. NaN always differs."""
    lines = []
    for name, weight in result.initial.items():
        if not torch.equal(weight, expected.initial[name]):
            lines.append(f"initial {name}")

    # Comparisons with NaN are false, so each condition states what is accepted.
    for step in range(STEPS):
        loss = result.losses[step]
        expected_loss = expected.losses[step]
        if not abs(loss - expected_loss) <= 1e-5:
            lines.append(f"loss of step {step + 1}: {loss} instead of {expected_loss}")
        norm = result.grad_norms[step]
        expected_norm = expected.grad_norms[step]
        if not abs(norm - expected_norm) <= 1e-6 * expected_norm:
            lines.append(f"norm of step {step + 1}: {norm} instead of {expected_norm}")

    for name, gradient in result.gradients.items():
        gradient_norm = expected.gradients[name].norm()
        error = (gradient - expected.gradients[name]).norm()
        # The 1e-10 allows for gradients that are zero except for rounding.
        if not error <= 1e-5 * gradient_norm + 1e-10:
            lines.append(f"gradient of {name}: off by {error / gradient_norm:.1e} of its norm")
    for name, weight in result.final.items():
        error = (weight - expected.final[name]).abs().max()
        if not error <= 1e-6:
            lines.append(f"final {name}: off by {error:.1e}")
    return lines


def grid_cases() -> Any:
    """Return the cases of both tiers. A case has a number of ranks, and pairs of a mesh and a family."""
    first = []
    for (num_ranks, name), group in FIRST.items():
        first.append(pytest.param(num_ranks, list(group.items()), id=f"{num_ranks}-{name}"))
    others = []
    for (num_ranks, mesh), families in OTHERS.items():
        pairs = [(mesh, family) for family in families]
        others.append(pytest.param(num_ranks, pairs, id=f"{num_ranks}-{mesh}-others"))
    return cases(first, nightly=others)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("num_ranks", "pairs"), grid_cases())
def test_each_family_equals_one_process(num_ranks: int, pairs: list[tuple[str, str]]) -> None:
    names_of_weights: dict[tuple[str, str], set[str]] = {pair: set() for pair in pairs}
    for rank, results in enumerate(run_ranks(num_ranks, run_pairs, num_ranks, pairs)):
        assert list(results) == pairs
        for (mesh, family), result in results.items():
            expected = one_process(family, num_layers(ALL[num_ranks][mesh]))
            assert differences(result, expected) == [], f"{family} on {mesh}, rank {rank}"
            names_of_weights[mesh, family].update(result.final)

    # together, the pipeline stages hold all weights
    for (mesh, family), names in names_of_weights.items():
        expected = one_process(family, num_layers(ALL[num_ranks][mesh]))
        assert names == expected.final.keys(), f"{family} on {mesh}"


def test_every_family_is_on_a_mesh_and_every_mesh_has_a_family() -> None:
    assert all(OTHERS.values())
    assert {family for families in OTHERS.values() for family in families} == set(FAMILIES)
    for num_ranks, mesh, family in DEFAULT:
        assert family in families_of(num_ranks, mesh)
    for num_ranks in (2, 4):  # in the default tier: on one axis, and on a product of two axes
        assert {family for ranks, _, family in DEFAULT if ranks == num_ranks} == set(FAMILIES), (
            num_ranks
        )


def test_a_stage_without_experts_joins_their_mesh() -> None:
    # the first layers of DeepSeek-V3 are dense, so a stage may have no experts while others create expert groups
    def dense_first(config: Config) -> Config:
        overrides = {**config.model.overrides, "num_layers": 4, "num_dense_layers": 2}
        return replace(config, model=replace(config.model, overrides=overrides))

    expected = run_tiny(1, dense_first(config("deepseek_v3", {})), STEPS)[0]
    for result in run_tiny(
        4, dense_first(on_mesh("deepseek_v3", 4, {**EP, **piped("1F1B")})), STEPS
    ):
        assert differences(result, expected) == []
