"""Hugging Face format of dense Qwen3 models. The model is in ``models/qwen3.py``."""

from __future__ import annotations

from typing import Any

from shardtrain.hub_formats.decoder_names import ATTENTION as NAMES
from shardtrain.hub_formats.decoder_names import (
    DECODER,
    DEFAULTS,
    HEAD_NORMS,
    ROTARY,
    feed_forward,
    read_decoder,
    write_decoder,
)
from shardtrain.hub_formats.format import Fields, HubFormat


def read_qwen3(f: Fields) -> dict[str, Any]:
    """Read the fields of the attention, the embedding and the head from ``config.json``."""
    f.only("attention_bias", False)
    f.full_attention()
    return {**read_decoder(f), "rope_theta": float(f.plain_rope()["rope_theta"])}


def _read(f: Fields) -> dict[str, Any]:
    return {**read_qwen3(f), "ffn_dim": f.integer("intermediate_size")}


def _write(c: Any) -> dict[str, Any]:
    return {
        **write_decoder(c),
        "intermediate_size": c.ffn_dim,
        "attention_bias": False,
        "use_sliding_window": False,
    }


HUB = HubFormat(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    names={**DECODER, **NAMES, **HEAD_NORMS, **feed_forward("layers.*.ffn", "model.layers.*.mlp")},
    read=_read,
    write=_write,
    ignored=ROTARY,
    defaults={
        **DEFAULTS,
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
)
