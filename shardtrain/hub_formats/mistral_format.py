"""Hugging Face format of Mistral. The model is in ``models/mistral.py``."""

from __future__ import annotations

from typing import Any

from shardtrain.hub_formats.decoder_names import DEFAULTS, ROTARY
from shardtrain.hub_formats.format import Fields, HubFormat
from shardtrain.hub_formats.llama_format import NAMES, read_llama, unused, write_llama
from shardtrain.utils.errors import ConfigError


def _read(f: Fields) -> dict[str, Any]:
    f.only("attention_bias", False)  # only in older files
    return {**read_llama(f), "qkv_bias": False, "sliding_window": f.take("sliding_window", int, 0)}


def _write(c: Any) -> dict[str, Any]:
    if c.qkv_bias:
        raise ConfigError("qkv_bias cannot be written to MistralForCausalLM; use model.name qwen2")
    return {**write_llama(c), "sliding_window": c.sliding_window or None}


HUB = HubFormat(
    architecture="MistralForCausalLM",
    model_type="mistral",
    names=NAMES,
    read=_read,
    write=_write,
    ignored=ROTARY,
    defaults={
        **DEFAULTS,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    unused=unused,
)
