"""Edge cases of sizes, such as no shared expert or only dense layers, have the numbers of one process on every mesh.

Meshes that the configuration check rejects are skipped.
"""

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
    "only dense layers": ("deepseek_v3", {"num_dense_layers": 4}),
    "no query compression": ("deepseek_v3", {"q_lora_rank": 0}),
    "a group per expert": ("deepseek_v3", {"num_groups": 8, "top_groups": 4, "group_top_k": 1}),
    "every expert": ("qwen3_moe", {"num_experts": 2, "top_k": 2}),
    "one layer": ("llama3", {"num_layers": 1}),
    "equal numbers of key and query heads": ("qwen3", {"num_kv_heads": 4}),
    "tied ends": ("qwen3", {"tied_embeddings": True}),
}
MESHES: dict[str, dict[str, Any]] = {
    "tp": TP,
    "ep": EP,
    "cp": {**CP, "context_parallel_method": "ulysses"},
}
NIGHTLY = {"fsdp": {}, "pp": piped("1F1B")}


def edged(config: Config, overrides: dict[str, Any]) -> Config:
    return replace(
        config, model=replace(config.model, overrides={**config.model.overrides, **overrides})
    )


def runs_on(mesh: str) -> list[str]:
    """Return the sizes that a mesh supports: with experts for EP, and with enough layers for PP."""
    if mesh == "ep":
        return [
            name for name, (family, _) in EDGES.items() if family in ("deepseek_v3", "qwen3_moe")
        ]
    return [name for name in EDGES if mesh != "pp" or name != "one layer"]


def run_edges(rank: int, mesh: str | None, layers: str) -> dict[str, Result]:
    results = {}
    for name in runs_on(layers):
        family, overrides = EDGES[name]
        keys = {**MESHES, **NIGHTLY}[mesh] if mesh else {}
        depth = {"num_layers": 4} if layers == "pp" else {}
        config_of_size = on_mesh(family, 2, keys) if mesh else config(family, {})
        results[name] = train_steps(rank, edged(config_of_size, {**depth, **overrides}), STEPS)
    return results


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "mesh", [*MESHES, *(pytest.param(mesh, marks=pytest.mark.nightly) for mesh in NIGHTLY)]
)
def test_edge_cases_of_sizes_have_the_numbers_of_one_process(mesh: str) -> None:
    (expected,) = run_ranks(1, run_edges, None, mesh)
    for results in run_ranks(2, run_edges, mesh, mesh):
        for name, result in results.items():
            assert differences(result, expected[name]) == [], name
