"""Pipeline stages of ``transformers`` networks: loss and each gradient are those of one process."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_architectures import ARCHITECTURES, WHOLE_SEQUENCES, WITHOUT_PLAN
from hf_meshes import FirstStep, deep_folder, difference, first_step, hf_tiny, piped
from ranks import run_ranks
from tiers import cases
from tiny import train_whole

from shardtrain import models
from shardtrain.config.schema import Config
from shardtrain.distributed import hf_stages
from shardtrain.utils.errors import ConfigError

pytest.importorskip("transformers")

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2 1F1B": (2, piped(2, "1F1B")),
    "pp4 GPipe": (4, piped(4, "GPipe")),
    "pp2 Interleaved1F1B": (2, piped(2, "Interleaved1F1B")),
    "pp2 ZBVZeroBubble": (2, piped(2, "ZBVZeroBubble")),
    "pp2 fsdp2 1F1B": (4, piped(2, "1F1B", data_parallel_shard_degree=2)),
    "pp2 tp2 1F1B": (4, piped(2, "1F1B", tensor_parallel_degree=2)),
    "pp2 cp2 1F1B": (4, piped(2, "1F1B", context_parallel_degree=2)),
}
DEFAULT = [("gemma2", "pp2 ZBVZeroBubble"), ("gpt2", "pp4 GPipe")]
REFUSED = {(name, "pp2 cp2 1F1B") for name in WHOLE_SEQUENCES}
REFUSED |= {(name, "pp2 tp2 1F1B") for name in WITHOUT_PLAN}
# The plan of Nemotron-H does not split its head, which loss parallelism requires.
REFUSED.add(("nemotron_h", "pp2 tp2 1F1B"))
# Layers of Zamba 2 receive the embeddings in addition to hidden states.
REFUSED |= {("zamba2", mesh) for mesh in MESHES}
NIGHTLY = [
    (name, mesh)
    for name in ARCHITECTURES
    for mesh in MESHES
    if (name, mesh) not in REFUSED and (name, mesh) not in DEFAULT
]


@pytest.mark.parametrize(("name", "mesh"), cases(DEFAULT, nightly=NIGHTLY))
def test_stages_have_the_numbers_of_one_process(name: str, mesh: str, tmp_path: Path) -> None:
    path = deep_folder(name)
    ranks, degrees = MESHES[mesh]
    # The global batch has 4 rows on every mesh.
    local_batch_size = 4 // degrees.get("data_parallel_shard_degree", 1)
    config = hf_tiny(
        path,
        tmp_path / "piped",
        parallelism=degrees,
        training={"local_batch_size": local_batch_size},
    )
    expected = run_ranks(1, first_step, hf_tiny(path, tmp_path / "one"))[0]
    results = run_ranks(ranks, first_step, config)

    assert difference(results, expected) <= 1e-5


@pytest.mark.parametrize(
    "change",
    [
        {"loss": math.nan},
        {"grad_norm": math.nan},
        {"gradients": {"weight": torch.tensor([math.nan])}},
    ],
)
def test_nan_is_a_difference(change: dict[str, Any]) -> None:
    expected = FirstStep({"weight": torch.zeros(1)}, 1.0, 1.0, {"weight": torch.ones(1)})
    assert difference([expected], expected) == 0
    assert math.isnan(difference([dataclasses.replace(expected, **change)], expected))


OPTIONS: dict[str, dict[str, Any]] = {
    "recomputed": {"activation_checkpoint": {"mode": "full"}},
    "recomputed by operation": {
        "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}
    },
    "adapters": {"lora": {"enable": True, "rank": 4, "alpha": 8.0}},
}


@pytest.mark.parametrize(
    "options", cases(["adapters"], nightly=["recomputed", "recomputed by operation"])
)
def test_options_have_the_numbers_of_one_process(options: str, tmp_path: Path) -> None:
    path = deep_folder("qwen3")
    sections = OPTIONS[options]
    expected = run_ranks(1, first_step, hf_tiny(path, tmp_path / "one", **sections))[0]
    config = hf_tiny(path, tmp_path / "piped", parallelism=piped(2, "ZBVZeroBubble"), **sections)

    assert difference(run_ranks(2, first_step, config), expected) <= 1e-5


@pytest.mark.nightly(
    "names of stages",
    by="tests/distributed/test_hf_pipeline.py::test_stages_have_the_numbers_of_one_process",
)
def test_explicit_stages_use_names_of_transformers(tmp_path: Path) -> None:
    path = deep_folder("gpt2")
    names = [f"transformer.h.{index}" for index in range(4)]
    parts = [
        ["transformer.wte", "transformer.wpe", names[0]],
        [*names[1:], "transformer.ln_f", "lm_head"],
    ]
    expected = run_ranks(1, first_step, hf_tiny(path, tmp_path / "one"))[0]
    degrees = piped(2, "1F1B", module_fqns_per_model_part=parts)

    assert (
        difference(
            run_ranks(2, first_step, hf_tiny(path, tmp_path / "piped", parallelism=degrees)),
            expected,
        )
        <= 1e-5
    )


def packed_run(path: Path, output: Path, degrees: dict[str, Any]) -> Config:
    """Return a run over packed documents that saves after two steps and exports its last weights."""
    file = output.parent / "rows.jsonl"
    texts = ["one two three four " * (1 + index % 3) + str(index) for index in range(40)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return hf_tiny(
        path,
        output,
        parallelism=degrees,
        training={"dataset": "jsonl", "dataset_path": str(file), "seq_len": 64, "steps": 3},
        data={"packing": "first_fit"},
        checkpoint={"interval": 2, "last_save_in_hf": True},
        activation_checkpoint={"mode": "full"},
    )


def test_run_over_packed_documents_resumes_without_stages_and_exports_the_same_weights(
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file

    path = deep_folder("gemma2")
    straight = run_ranks(1, train_whole, packed_run(path, tmp_path / "straight", {}))[0]
    degrees = piped(2, "Interleaved1F1B")
    first = run_ranks(2, train_whole, packed_run(path, tmp_path / "cut", degrees), 2)[0]
    resumed = run_ranks(1, train_whole, packed_run(path, tmp_path / "cut", {}))[0]

    assert straight.error is None
    assert resumed.error is None
    assert first.error is None
    assert [*first.losses, *resumed.losses] == pytest.approx(straight.losses, rel=1e-5)

    piped_run = run_ranks(2, train_whole, packed_run(path, tmp_path / "piped", degrees))[0]
    assert piped_run.error is None

    expected = load_file(next((tmp_path / "straight").rglob("model.safetensors")))
    exported = load_file(next((tmp_path / "piped").rglob("model.safetensors")))
    assert exported.keys() == expected.keys()
    for name, tensor in expected.items():
        # float32 rounding that a few optimizer steps amplify
        torch.testing.assert_close(exported[name], tensor, atol=1e-5, rtol=0, msg=name)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "encoder and decoder": (
        "T5ForConditionalGeneration",
        {"vocab_size": 64, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2},
        "the layers of its decoder read the output of the encoder",
    ),
    "one layer for all": (
        "AlbertForMaskedLM",
        {
            "vocab_size": 64,
            "embedding_size": 8,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
        },
        "is called out of order or more than once",
    ),
    "keys and values of another layer": (
        "Gemma3nForCausalLM",
        {
            "vocab_size": 64,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "vocab_size_per_layer_input": 64,
            "hidden_size_per_layer_input": 4,
            "laurel_rank": 4,
        },
        "cannot cut Gemma3nForCausalLM into stages",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_network_that_is_no_chain_is_rejected_by_name(kind: str, tmp_path: Path) -> None:
    import transformers

    name, fields, message = REFUSED[kind]
    if not hasattr(transformers, name):
        pytest.skip("this version does not have the class")
    config = getattr(transformers, name).config_class
    config = getattr(config, "sub_configs", {}).get("text_config", config)(
        **fields, architectures=[name]
    )
    config.save_pretrained(tmp_path)
    module = models.find("transformers")
    model = models.build(
        module, models.shape_of(module, "folder", {"path": str(tmp_path)}, "rmsnorm")
    )

    with pytest.raises(ConfigError) as raised:
        hf_stages.trace(model)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
