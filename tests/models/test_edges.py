"""Sizes at their edge (no shared expert, no dense layer, dense layers alone, no latent of queries, a group per expert)
have the numbers of one process wherever the configuration check lets them pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ranks import run_ranks
from test_grid import CP, EP, STEPS, TP, config, differences, on_mesh, piped
from tiny import Result, train_steps

from shardtrain.config.schema import Config

EDGES: dict[str, tuple[str, dict[str, Any]]] = {
    "no shared expert": ("deepseek_v3", {"num_shared_experts": 0}),
    "no dense layer": ("deepseek_v3", {"num_dense_layers": 0}),
    "dense layers alone": ("deepseek_v3", {"num_dense_layers": 4}),
    "no latent of queries": ("deepseek_v3", {"q_lora_rank": 0}),
    "a group per expert": ("deepseek_v3", {"num_groups": 8, "top_groups": 4, "group_top_k": 1}),
    "every expert": ("qwen3_moe", {"num_experts": 2, "top_k": 2}),
    "one layer": ("llama3", {"num_layers": 1}),
    "as many key heads as heads": ("qwen3", {"num_kv_heads": 4}),
    "tied ends": ("qwen3", {"tied_embeddings": True}),
}
MESHES: dict[str, dict[str, Any]] = {"tp": TP, "ep": EP, "cp": {**CP, "context_parallel_method": "ulysses"}}
NIGHTLY = {"fsdp": {}, "pp": piped("1F1B")}


def edged(config: Config, overrides: dict[str, Any]) -> Config:
    return replace(config, model=replace(config.model, overrides={**config.model.overrides, **overrides}))


def runs_on(mesh: str) -> list[str]:
    """The names of sizes that a mesh can have: experts for ep; as many layers as stages for pp."""
    if mesh == "ep":
        return [name for name, (family, _) in EDGES.items() if family in ("deepseek_v3", "qwen3_moe")]
    return [name for name in EDGES if mesh != "pp" or name != "one layer"]


def run_edges(rank: int, mesh: str | None, layers: str) -> dict[str, Result]:
    found = {}
    for name in runs_on(layers):
        family, overrides = EDGES[name]
        keys = {**MESHES, **NIGHTLY}[mesh] if mesh else {}
        depth = {"num_layers": 4} if layers == "pp" else {}
        made = on_mesh(family, 2, keys) if mesh else config(family, {})
        found[name] = train_steps(rank, edged(made, {**depth, **overrides}), STEPS)
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize("mesh", [*MESHES, *(pytest.param(mesh, marks=pytest.mark.nightly) for mesh in NIGHTLY)])
def test_sizes_at_the_edge_have_the_numbers_of_one_process(mesh: str) -> None:
    (expected,) = run_ranks(1, run_edges, None, mesh)
    for results in run_ranks(2, run_edges, mesh, mesh):
        for name, result in results.items():
            assert differences(result, expected[name]) == [], name
