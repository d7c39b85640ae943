"""Experts of ``transformers`` networks that are split over ranks have the loss and each gradient of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hf_architectures import hf_folder
from hf_meshes import deep_folder, difference, first_step, hf_tiny, piped
from ranks import run_ranks
from tiers import cases
from tiny import tiny_config

from shardtrain import models
from shardtrain.distributed import hf_experts
from shardtrain.utils.errors import ConfigError

pytest.importorskip("transformers")

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"expert_parallel_degree": 2}),
    "ep4": (4, {"expert_parallel_degree": 4}),
    "ep2 of fsdp4": (4, {"expert_parallel_degree": 2}),
    "ep2 tp2": (2, {"expert_parallel_degree": 2, "tensor_parallel_degree": 2}),
    "pp2 ep2": (
        4,
        {**piped(2, "1F1B"), "expert_parallel_degree": 2, "data_parallel_shard_degree": 2},
    ),
}
NAMES = (
    "mixtral",
    "qwen3_moe",
    "granitemoe",
    "glm4_moe",
    "ernie4_5_moe",
    "hunyuan_moe",
    "gpt_oss",
    "deepseek_v3",
    "deepseek_v32",
)
DEFAULT = [("gpt_oss", "ep2 of fsdp4"), ("qwen3_moe", "ep2 tp2")]
NIGHTLY = [(name, mesh) for name in NAMES for mesh in MESHES if (name, mesh) not in DEFAULT]


@pytest.mark.parametrize(("name", "mesh"), cases(DEFAULT, nightly=NIGHTLY))
def test_split_experts_have_the_numbers_of_one_process(
    name: str, mesh: str, tmp_path: Path
) -> None:
    path = deep_folder(name) if "pp" in mesh else hf_folder(name)
    ranks, degrees = MESHES[mesh]
    training = {"local_batch_size": 2 if mesh == "pp2 ep2" else 1}
    expected = run_ranks(1, first_step, hf_tiny(path, tmp_path / "one"))[0]
    config = hf_tiny(path, tmp_path / "split", parallelism=degrees, training=training)

    assert difference(run_ranks(ranks, first_step, config), expected) <= 1e-5


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no experts": ("LlamaForCausalLM", {}, "and LlamaForCausalLM has none"),
    "number of experts": (
        "MixtralForCausalLM",
        {"num_local_experts": 3},
        "does not divide the 3 experts of hf.model.layers.0.mlp.experts",
    ),
    "own experts": (
        "JetMoeForCausalLM",
        {"num_local_experts": 2, "num_experts_per_tok": 1, "kv_channels": 8},
        "of JetMoeForCausalLM does not",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_experts_that_cannot_be_split_are_rejected_by_name(kind: str, tmp_path: Path) -> None:
    import transformers

    name, fields, message = REFUSED[kind]
    sizes = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config_class = getattr(transformers, name).config_class
    config_class(**{**sizes, **fields}, architectures=[name]).save_pretrained(tmp_path)
    module = models.find("transformers")
    model = models.build(
        module, models.shape_of(module, "folder", {"path": str(tmp_path)}, "rmsnorm")
    )

    with pytest.raises(ConfigError) as raised:
        hf_experts.check(model, tiny_config(parallelism={"expert_parallel_degree": 2}))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
