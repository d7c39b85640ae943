"""Sizes with which a model cannot be built, or computes nothing, are rejected without importing torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardtrain.config import check, load

LLAMA = {
    "dim": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "ffn_dim": 128,
}
LATENT = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    *(("llama3", {name: 0}, f"{name}=0", "leaves nothing to compute") for name in LLAMA),
    ("qwen3_moe", {"moe_ffn_dim": 0}, "moe_ffn_dim=0", "leaves nothing to compute"),
    ("mixtral", {"num_experts": 0}, "num_experts=0", "leaves nothing to compute"),
    ("llama3", {"num_layers": 10**7}, "num_layers=10000000", "is above 4096, which no model has"),
    ("mixtral", {"num_experts": 2**31}, "num_experts=2147483648", "is above 4096"),
    ("llama3", {"ffn_dim": 1e15}, "ffn_dim=1000000000000000.0", "is above 2147483647"),
    ("llama3", {"num_kv_heads": 3}, "num_kv_heads=3", "does not divide the 4 attention heads"),
    ("qwen3", {"num_heads": 4, "num_kv_heads": 8}, "num_kv_heads=8", "use 1, 2 or 4"),
    ("llama3", {"head_dim": 15}, "head_dim=15", "must be even"),
    ("deepseek_v3", {**LATENT, "qk_rope_head_dim": 7}, "qk_rope_head_dim=7", "must be even"),
    ("deepseek_v3", {**LATENT, "v_head_dim": 32}, "v_head_dim=32", "exceeds the 24 features"),
    ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank=0", "leaves nothing to compute"),
    ("deepseek_v3", {"rope_theta": 1.0}, "rope_theta=1.0", "YaRN"),
    ("deepseek_v3", {"rope_factor": 0.0}, "rope_factor=0.0", "above 0"),
    ("llama3", {"rope_theta": 0.0}, "rope_theta=0.0", "above 0"),
    ("llama3", {"rope_scaling": "dynamic"}, 'rope_scaling="dynamic"', "not a scaling of rotary angles"),
    ("llama3", {"rope_scaling": "llama3", "rope_low_freq_factor": 4.5}, "rope_low_freq_factor=4.5", "is above"),
]  # fmt: skip


def problems(tmp_path: Path, name: str, overrides: dict[str, Any]) -> list[str]:
    path = tmp_path / "run.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in overrides.items()]
    path.write_text(
        f'[model]\nname = "{name}"\nflavor = "{FLAVORS.get(name, "debugmodel")}"\n[model.overrides]\n'
        + "\n".join(lines)
    )
    return [str(problem) for problem in check(load(str(path), []))]


FLAVORS = {"qwen3_moe": "debugmodel_moe"}


@pytest.mark.parametrize(("name", "overrides", "option", "rule"), WRONG)
def test_an_impossible_size_is_one_problem(
    tmp_path: Path, name: str, overrides: dict[str, Any], option: str, rule: str
) -> None:
    sizes = LLAMA if name in ("llama3", "qwen3") else {}
    (line,) = problems(tmp_path, name, {**sizes, **overrides})
    assert f"model.overrides.{option}" in line
    assert rule in line
    assert ";" in line


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_shared_experts": 0},
        {"num_dense_layers": 0},
        {"num_dense_layers": 6},
        {"q_lora_rank": 0},
        {"num_heads": 1},
        {"num_layers": 3.0, "dim": 1e2},
        {"num_experts": 1, "top_k": 1},
    ],
)
def test_sizes_at_the_limit_are_not_a_problem(tmp_path: Path, overrides: dict[str, Any]) -> None:
    assert problems(tmp_path, "deepseek_v3", overrides) == []
