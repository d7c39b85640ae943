"""Rules for models with experts: one line per problem, with its fix. torchtitan's qwen3 flavors with experts load."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtrain.config import Loaded
from shardtrain.config.load import load
from shardtrain.config.machine_rules import machine_notes
from shardtrain.config.rules import check

MIXTRAL = '[model]\nname = "mixtral"\n'
DEEPSEEK = '[model]\nname = "deepseek_v3"\n'


def loaded(tmp_path: Path, text: str, *arguments: str) -> Loaded:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return load(file, list(arguments))


@pytest.mark.parametrize(
    ("text", "option", "rule"),
    [
        (
            f"{MIXTRAL}[parallelism]\nexpert_parallel_degree = 3",
            "expert_parallel_degree=3",
            "8 experts",
        ),
        (
            "[parallelism]\nexpert_parallel_degree = 2",
            "expert_parallel_degree=2",
            "llama3/debugmodel has none",
        ),
        (
            "[debug]\nmoe_force_load_balance = true",
            "moe_force_load_balance",
            "llama3/debugmodel has none",
        ),
        (
            f"{MIXTRAL}[parallelism]\nexpert_parallel_degree = 4\ntensor_parallel_degree = 2\n"
            "data_parallel_shard_degree = 3",
            "expert_parallel_degree=4",
            "does not divide the 6 ranks",
        ),
        (
            f"{MIXTRAL}[parallelism]\nexpert_tensor_parallel_degree = 2\ntensor_parallel_degree = 4",
            "expert_tensor_parallel_degree=2",
            "must be 1 or tensor_parallel_degree",
        ),
        (
            f"{MIXTRAL}[parallelism]\nexpert_parallel_degree = 2\ncontext_parallel_degree = 2\n"
            "data_parallel_shard_degree = 9",
            "expert_parallel_degree=2",
            "leaves 9 ranks to share experts, which does not divide their sizes (256 or 384)",
        ),
        (f"{MIXTRAL}[model.overrides]\ntop_k = 9", "top_k=9", "between 1 and the 8 experts"),
        (
            f"{DEEPSEEK}[model.overrides]\nnum_groups = 3",
            "num_groups=3",
            "does not divide the 8 experts",
        ),
        (
            f"{DEEPSEEK}[model.overrides]\nnum_groups = 4\ntop_groups = 5",
            "top_groups=5",
            "between 1 and the 4 groups",
        ),
        (
            f"{DEEPSEEK}[model.overrides]\nnum_groups = 4\ntop_groups = 1",
            "top_k=3",
            "exceeds the 2 experts",
        ),
        (f'{MIXTRAL}[model.overrides]\nscore_func = "tanh"', "score_func", "not a score function"),
        (
            f"{DEEPSEEK}[model.overrides]\nnum_layers = 2\nnum_dense_layers = 2\n[parallelism]\n"
            "expert_parallel_degree = 2",
            "expert_parallel_degree=2",
            "all 2 layers are dense",
        ),
        (
            f"{DEEPSEEK}[model.overrides]\nnum_groups = 4\ntop_groups = 4\ngroup_top_k = 3",
            "group_top_k=3",
            "2 experts of a",
        ),
        (
            f"{DEEPSEEK}[model.overrides]\nnum_experts = 0",
            "num_experts=0",
            "leaves nothing to compute",
        ),
        (
            f"{DEEPSEEK}[model.overrides]\nmoe_ffn_dim = 33\n[parallelism]\ntensor_parallel_degree = 4",
            "tensor_parallel_degree=4",
            "shared experts' feed-forward dimension 66",
        ),
    ],
)
def test_an_impossible_option_is_one_problem(
    tmp_path: Path, text: str, option: str, rule: str
) -> None:
    lines = [str(problem) for problem in check(loaded(tmp_path, text))]
    assert len(lines) == 1, lines
    assert option in lines[0]
    assert rule in lines[0]
    assert ";" in lines[0]  # a fix follows the semicolon


def test_ranks_that_follow_from_the_world_are_checked_too(tmp_path: Path) -> None:
    config = loaded(tmp_path, f"{MIXTRAL}[parallelism]\nexpert_parallel_degree = 4")
    assert check(config) == []
    assert [str(p) for p in machine_notes(config, world_size=4)] == []

    (problem,) = machine_notes(config, world_size=6)
    assert "expert_parallel_degree=4 does not divide the 6 ranks" in str(problem)


@pytest.mark.parametrize(
    "text",
    [
        f"{MIXTRAL}[parallelism]\nexpert_parallel_degree = 8\ntensor_parallel_degree = 2",
        f"{DEEPSEEK}[model.overrides]\nnum_dense_layers = 0\nnum_shared_experts = 0",
        f"{DEEPSEEK}[parallelism]\nexpert_parallel_degree = 2\n[debug]\nmoe_force_load_balance = true",
        '[model]\nname = "deepseek_v3"\nflavor = "671B"\n[parallelism]\nexpert_parallel_degree = 64',
        # All layers have experts, so no layer uses ffn_dim, which tp=2 does not divide.
        '[model]\nname = "qwen3_moe"\nflavor = "debugmodel_moe"\n[model.overrides]\nffn_dim = 33\n'
        "[parallelism]\ntensor_parallel_degree = 2",
    ],
)
def test_a_possible_option_is_not_a_problem(tmp_path: Path, text: str) -> None:
    assert [str(problem) for problem in check(loaded(tmp_path, text))] == []


def test_flavors_with_experts_of_torchtitans_qwen3_are_found(tmp_path: Path) -> None:
    config = loaded(tmp_path, '[model]\nname = "qwen3"\nflavor = "30B-A3B"')
    assert config.config.model.name == "qwen3_moe"
    assert any("qwen3_moe" in notice for notice in config.notices)

    from_line = loaded(tmp_path, '[model]\nname = "qwen3"', "--model.flavor", "debugmodel_moe")
    assert from_line.config.model.name == "qwen3_moe"
    assert loaded(tmp_path, '[model]\nname = "qwen3"\nflavor = "8B"').config.model.name == "qwen3"
