"""Exports have what llama.cpp's converter and vLLM read: config, weights, tokenizer, special tokens, chat template.

The converter is a script of llama.cpp. Its names of tensors, special tokens and chat templates come from the package
``gguf``. vLLM opens config and tokenizer with ``transformers``.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import against
import pytest
import torch
from hub_folders import build, save
from ranks import run_ranks
from safetensors import safe_open
from tiers import cases
from tiny import train_whole

from shardtrain.hf.hub_model import recognise

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

# Keys of config.json that convert_hf_to_gguf.py reads for Llama, Mistral, Qwen2 and Qwen3
REQUIRED = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "rms_norm_eps", "vocab_size", "max_position_embeddings",
)  # fmt: skip
ARCHITECTURES = {
    "llama3": ("LlamaForCausalLM", "LLAMA"),
    "qwen3": ("Qwen3ForCausalLM", "QWEN3"),
}


def exported(tmp_path: Path, family: str, tied: bool) -> Path:
    """Train a step from a folder with a chat template, and return the folder of its last save."""
    source = tmp_path / "source"
    shutil.copytree(against.folder(), source)
    for path in source.glob("model*"):
        path.unlink()
    vocab_size = json.loads((source / "config.json").read_text())["vocab_size"]
    save(build(family, vocab_size=vocab_size, tie_word_embeddings=tied), source)
    run = tmp_path / "run"
    run.mkdir()
    (run / "rows.jsonl").write_text(json.dumps({"text": "the cat sat on the mat " * 8}) + "\n")
    config = against.config_for(
        run,
        training={"steps": 1, "local_batch_size": 1, "global_batch_size": 1},
        checkpoint={
            "initial_load_path": str(source),
            "last_save_in_hf": True,
            "export_dtype": "bfloat16",
        },
    )
    hub_model = recognise(source)
    model = dataclasses.replace(
        config.model,
        name=hub_model.name,
        flavor=hub_model.flavor,
        overrides=dict(hub_model.overrides),
        hf_assets_path=str(source),
    )
    (ended,) = run_ranks(1, train_whole, dataclasses.replace(config, model=model))
    assert ended.error is None
    return run / "checkpoint" / "step-1-hf"


CASES = [("llama3", True)]
OTHERS = [("llama3", False), ("qwen3", True), ("qwen3", False)]


@pytest.mark.parametrize(("family", "tied"), cases(CASES, nightly=OTHERS))
def test_export_has_what_converter_and_server_read(tmp_path: Path, family: str, tied: bool) -> None:
    folder = exported(tmp_path, family, tied)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    architecture, gguf_name = ARCHITECTURES[family]

    assert config["architectures"] == [architecture]
    assert config["tie_word_embeddings"] is tied
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    for key in REQUIRED:
        assert config[key], key

    rope = config.get("rope_parameters") or config
    assert rope["rope_theta"]

    # Each tensor has a name in GGUF, and the files have the dtype of the config.
    tensor_names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[gguf_name], config["num_hidden_layers"])
    stored = {}
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                stored[name] = file.get_tensor(name)

    for name, tensor in stored.items():
        assert tensor.dtype == torch.bfloat16
        assert tensor_names.get_name(name, try_suffixes=(".weight", ".bias")), name
    # A converter writes a tied head only once, so a second copy would be a surplus tensor.
    assert ("lm_head.weight" in stored) is not tied
    assert stored["model.embed_tokens.weight"].size(0) == config["vocab_size"]

    # Tokenizer: vocabulary, merges, special tokens and chat template
    special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=config["vocab_size"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    assert special.merges
    assert special.special_token_ids["bos"] == tokenizer.bos_token_id
    assert special.special_token_ids["eos"] == tokenizer.eos_token_id
    assert special.chat_template == tokenizer.chat_template == against.CHAT
    assert len(tokenizer) <= config["vocab_size"]

    end = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.eos_token_id in (end if isinstance(end, list) else [end])

    # The server opens config and weights with these classes.
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == architecture
    assert model.dtype == torch.bfloat16
