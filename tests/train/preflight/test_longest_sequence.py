"""A sequence that is longer than the positions of a transformers network is refused before ranks start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardtrain import config as configs
from shardtrain.models import architecture
from shardtrain.models import transformers as route
from shardtrain.train.preflight import longest_sequence, meta_model
from shardtrain.utils.errors import ConfigError

transformers = pytest.importorskip("transformers")

LIMIT = 64
_HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = {
    **_HEADS,
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": LIMIT,
    "pad_token_id": 0,
}
_GPT = {"vocab_size": 512, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LIMIT}
_BART = {
    "vocab_size": 512,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": LIMIT,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
}
LOCAL = [[["global", "local"], 1]]
OPT = {**_TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32, "pad_token_id": 1}
LIMITED: dict[str, dict[str, Any]] = {
    # a table with a row per position
    "GPT2LMHeadModel": _GPT,
    "GPTBigCodeForCausalLM": _GPT,
    "BertForMaskedLM": _TEXT,
    # more rows than positions: config.json counts them in RoBERTa, but not in OPT
    "RobertaForMaskedLM": {**_TEXT, "max_position_embeddings": LIMIT + 1},
    "OPTForCausalLM": OPT,
    "BioGptForCausalLM": {**_TEXT, "pad_token_id": 1},
    "BartForConditionalGeneration": _BART,
    # a table of sines with a row per position
    "MarianMTModel": {**_BART, "decoder_start_token_id": 1},
    "XGLMForCausalLM": {
        "vocab_size": 512,
        "d_model": 32,
        "ffn_dim": 64,
        "num_layers": 2,
        "attention_heads": 4,
        "max_position_embeddings": LIMIT,
    },
    # a table, and a mask of a fixed size
    "GPTNeoForCausalLM": {
        "vocab_size": 512,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "max_position_embeddings": LIMIT,
        "attention_types": LOCAL,
        "window_size": 16,
    },
    "OpenAIGPTLMHeadModel": _GPT,
    # computed rotary or sinusoidal positions
    "GPTJForCausalLM": {**_GPT, "rotary_dim": 4},
    "CTRLLMHeadModel": {**_GPT, "dff": 64},
    # computed attention biases (ALiBi)
    "MptForCausalLM": {
        "vocab_size": 512,
        "d_model": 32,
        "n_layers": 2,
        "n_heads": 4,
        "max_seq_len": LIMIT,
    },
}
"""Class -> fields of a config with positions for ``LIMIT`` tokens."""
GROWS = ("XGLMForCausalLM",)
"""Classes whose table grows in transformers. Here it is computed once, from config.json."""
UNLIMITED: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {**_TEXT, "num_key_value_heads": 2},
    "PhiForCausalLM": _TEXT,
    "FalconForCausalLM": {**_TEXT, "bias": False},
    "BloomForCausalLM": {"vocab_size": 512, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "T5ForConditionalGeneration": {
        "vocab_size": 512,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 1,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    },
}
"""Class -> fields of a config whose maximum length no table enforces, or which has none."""


def folder_of(name: str, fields: dict[str, Any], folder: Path) -> Path:
    """Write the config.json of a class."""
    content = getattr(transformers, name).config_class(**fields).to_dict()
    content |= {"architectures": [name], **fields}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def runs(name: str, folder: Path, num_tokens: int) -> bool:
    """True if the class of transformers itself runs a sequence."""
    network = getattr(transformers, name)(architecture.read(str(folder))).eval()
    tokens_BT = torch.full((1, num_tokens), 3)
    inputs = {"input_ids": tokens_BT}
    if network.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens_BT
    try:
        with torch.no_grad():
            network(**inputs)
    except (IndexError, RuntimeError):
        return False
    return True


def refusal_of(folder: Path, num_tokens: int) -> str:
    """Return the error of a run with sequences of some tokens, or ""."""
    network = route.Model(route.Config(path=str(folder)))
    loaded = configs.load(None, ["--training.seq_len", str(num_tokens)])
    try:
        longest_sequence.check(network, loaded.config)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", LIMITED)
def test_a_sequence_beyond_the_positions_of_a_network_is_refused(name, tmp_path):
    folder = folder_of(name, LIMITED[name], tmp_path)
    assert runs(name, folder, LIMIT)
    assert runs(name, folder, LIMIT + 1) == (name in GROWS)
    assert refusal_of(folder, LIMIT) == ""
    for num_tokens in (LIMIT + 1, LIMIT + 40, 100_000):
        refusal = refusal_of(folder, num_tokens)
        assert refusal.startswith(f"training.seq_len={num_tokens} exceeds the {LIMIT} positions")
        assert f"use at most {LIMIT}" in refusal


@pytest.mark.parametrize("name", UNLIMITED)
def test_a_network_without_a_limit_accepts_longer_sequences(name, tmp_path):
    folder = folder_of(name, UNLIMITED[name], tmp_path)
    assert runs(name, folder, 2 * LIMIT)
    assert refusal_of(folder, 2 * LIMIT) == ""


def test_config_check_finds_it(tmp_path):
    folder = folder_of("GPTNeoForCausalLM", LIMITED["GPTNeoForCausalLM"], tmp_path)
    options = ["--model.name", "transformers", "--model.overrides.path", str(folder)]
    loaded = configs.load(None, [*options, "--training.seq_len", str(2 * LIMIT)])
    (error,), parameters = meta_model.build(loaded.config)
    assert parameters is None
    assert "training.seq_len=128 exceeds the 64 positions of GPTNeoForCausalLM" in str(error)
