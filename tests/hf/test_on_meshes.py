"""On any mesh, a run loads the same weights from a Hugging Face folder as on one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hub_folders import build, save
from hub_runs import EXPERTS, MESHES, config_for, refused, start
from ranks import run_ranks
from tiers import cases
from torch import Tensor

pytest.importorskip("transformers")

CASES = [
    *((family, mesh) for family in ("llama3", "qwen3_moe", "deepseek_v3") for mesh in MESHES),
    *((family, mesh) for family in ("qwen3_moe", "mixtral") for mesh in EXPERTS),
    *(("qwen3", mesh) for mesh in MESHES),
]


FIRST = [
    ("llama3", "fsdp=2 tp=2"),
    ("deepseek_v3", "pp=2"),
    ("qwen3_moe", "one"),
    ("mixtral", "fsdp=4 ep=2"),
]


@pytest.mark.parametrize(
    ("family", "mesh"), cases(FIRST, nightly=[case for case in CASES if case not in FIRST])
)
def test_a_run_starts_from_the_weights_of_a_folder(family: str, mesh: str, tmp_path: Path) -> None:
    reference = build(family)
    folder = save(reference, tmp_path / "hf", shard_bytes=20_000)
    config = config_for(folder, tmp_path / "run", mesh)
    sizes = {"fsdp=2 tp=2": 4, "pp=2": 2, "one": 1, "fsdp=4 ep=2": 4}
    parts: list[dict[str, Tensor]] = run_ranks(sizes[mesh], start, config)
    weights: dict[str, Tensor] = {}
    for part in parts:
        weights |= part
    state = reference.state_dict()

    assert torch.equal(weights["embed.weight"], state["model.embed_tokens.weight"])
    assert torch.equal(
        weights["layers.1.attn.wo.weight"], state["model.layers.1.self_attn.o_proj.weight"]
    )

    if family in ("qwen3_moe", "mixtral", "deepseek_v3"):
        # transformers stores all experts of a layer in one tensor, with the gates first.
        fused = state["model.layers.1.mlp.experts.gate_up_proj"]
        assert torch.equal(weights["layers.1.moe.experts.w1"], fused.chunk(2, dim=1)[0])
        assert torch.equal(weights["layers.1.moe.experts.w3"], fused.chunk(2, dim=1)[1])
    # A mesh changes no weight.
    if mesh != "one":
        weights_of_one = run_ranks(1, start, config_for(folder, tmp_path / "alone", "one"))[0]
        assert weights.keys() == weights_of_one.keys()
        for name, weight in weights_of_one.items():
            assert torch.equal(weights[name], weight)


def test_an_unreadable_file_stops_every_rank(tmp_path: Path) -> None:
    folder = save(build("llama3"), tmp_path / "hf", shard_bytes=20_000)
    config = config_for(folder, tmp_path / "run", "fsdp=2 tp=2")
    victim = sorted(folder.glob("model-*.safetensors"))[1]
    victim.write_bytes(victim.read_bytes()[:-10])
    answers = run_ranks(4, refused, config)

    assert {name for name, _ in answers} == {"CheckpointError"}
    assert all(victim.name in text for _, text in answers)

    # A model that differs from the folder is refused too.
    run_config = config_for(folder, tmp_path / "alone", "one")
    model = dataclasses.replace(
        run_config.model, overrides={**run_config.model.overrides, "num_heads": 8}
    )
    name, text = run_ranks(1, refused, dataclasses.replace(run_config, model=model))[0]

    assert name == "ConfigError"
    assert "num_heads=8 instead of 4" in text
