"""Mistral (Jiang et al. 2023): a Llama with few key-value heads, of which version 0.1 attends within a sliding window.

Later versions and Nemo have no window. ``sliding_window`` counts the tokens that a token sees, itself among them.
"""

from __future__ import annotations

from typing import Any

from shardtrain.errors import ConfigError
from shardtrain.hub.format import Fields, Hub
from shardtrain.hub.llama import NAMES, read_llama, write_llama
from shardtrain.hub.words import ROTARY
from shardtrain.models.llama import LAYOUT, Config, Model, initial

__all__ = ["FLAVORS", "HUB", "LAYOUT", "Config", "Model", "initial"]

FLAVORS = {
    "debugmodel": {
        "vocab_size": 2048,
        "dim": 256,
        "num_layers": 6,
        "num_heads": 16,
        "num_kv_heads": 4,
        "head_dim": 16,
        "ffn_dim": 768,
        "sliding_window": 64,
    },
    "7B-v0.1": {"num_kv_heads": 8, "ffn_dim": 14336, "sliding_window": 4096},
    "7B-v0.2": {"num_kv_heads": 8, "ffn_dim": 14336, "rope_theta": 1e6},
    "7B-v0.3": {"vocab_size": 32768, "num_kv_heads": 8, "ffn_dim": 14336, "rope_theta": 1e6},
    "Nemo-12B": {
        "vocab_size": 131072,
        "dim": 5120,
        "num_layers": 40,
        "num_kv_heads": 8,
        "ffn_dim": 14336,
        "rope_theta": 1e6,
    },
}


def _read(f: Fields) -> dict[str, Any]:
    return {**read_llama(f), "qkv_bias": False, "sliding_window": f.take("sliding_window", int, 0)}


def _write(c: Config) -> dict[str, Any]:
    if c.qkv_bias:
        raise ConfigError("qkv_bias has no place in MistralForCausalLM; use model.name qwen2")
    return {**write_llama(c), "sliding_window": c.sliding_window or None}


HUB = Hub(
    architecture="MistralForCausalLM",
    model_type="mistral",
    names=NAMES,
    read=_read,
    write=_write,
    ignored=ROTARY,
)
