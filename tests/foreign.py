"""Create tiny local models of ``transformers`` architectures with different features."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from tiny import tiny_config

from shardtrain.config.schema import Config

BYTES = {"pad_token_id": 0, "bos_token_id": 256, "eos_token_id": 257}
"""Padding token of the byte tokenizer. No text contains byte 0."""
_SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    **BYTES,
}
_BART: dict[str, Any] = {
    "vocab_size": 512,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 64,
    **BYTES,
    "decoder_start_token_id": 257,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**_SMALL, "num_key_value_heads": 2}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 512, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **BYTES},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        {**_SMALL, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16},
    ),
    "phi": ("PhiForCausalLM", _SMALL),
    "qwen3": ("Qwen3ForCausalLM", {**_SMALL, "num_key_value_heads": 2, "head_dim": 8}),
    "opt": (
        "OPTForCausalLM",
        {**_SMALL, "ffn_dim": 64, "max_position_embeddings": 64, "word_embed_proj_dim": 32},
    ),
    "bert": ("BertForMaskedLM", {**_SMALL, "max_position_embeddings": 64}),
    "bart": ("BartForConditionalGeneration", _BART),
    "bart_classifier": ("BartForSequenceClassification", {**_BART, "num_labels": 3}),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": 512,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "eos_token_id": 257,
            "decoder_start_token_id": 0,
        },
    ),
    "mixtral": ("MixtralForCausalLM", {**_SMALL, "num_key_value_heads": 2, "num_local_experts": 2}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            **_SMALL,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "attn_implementation": "eager",
        },
    ),
}
"""fused weights and learned positions (gpt2, opt), norms of 1 + w and tied ends (gemma2), biases (phi), norms of heads
(qwen3), relative positions (t5), experts (mixtral), experts with weights (experts, inputs, outputs) (gpt_oss)."""


@functools.cache
def folder(name: str) -> Path:
    """Return a folder of ``save_pretrained`` with random weights, including biases and norms."""
    import transformers

    architecture, shape = SHAPES[name]
    cls = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = cls(cls.config_class(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    path = Path(tempfile.mkdtemp(prefix="shardtrain-tests-")) / name
    model.save_pretrained(path)
    return path


def config_for(
    name: str,
    output: Path,
    in_hf: bool = True,
    overrides: dict[str, Any] | None = None,
    **sections: Any,
) -> Config:
    """Return the tiny configuration for such a folder. ``in_hf`` starts from its weights."""
    load = {"initial_load_path": str(folder(name)), "initial_load_in_hf": True} if in_hf else {}
    config = tiny_config(
        **{
            **sections,
            "job": {"dump_folder": str(output)},
            "training": {
                "seq_len": 32,
                "max_norm": 1e9,
                "steps": 3,
                **sections.get("training", {}),
            },
            "checkpoint": {"enable": True, "interval": 2, **load, **sections.get("checkpoint", {})},
        }
    )
    fields = {"path": str(folder(name)), **(overrides or {})}
    model = dataclasses.replace(
        config.model, name="transformers", flavor="folder", overrides=fields
    )
    return dataclasses.replace(config, model=model)
