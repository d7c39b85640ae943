"""Qwen3, dense, in the format of the Hugging Face hub; the model is in ``models/qwen3.py``."""

from __future__ import annotations

from typing import Any

from shardtrain.hub.format import Fields, Hub, plain_rope
from shardtrain.hub.words import ATTENTION as NAMES
from shardtrain.hub.words import DECODER, HEAD_NORMS, ROTARY, feed_forward, read_decoder, write_decoder


def read_qwen3(f: Fields) -> dict[str, Any]:
    """What ``config.json`` says of the attention and the ends."""
    f.only("attention_bias", False)
    f.only("use_sliding_window", False)
    f.take("sliding_window", int, 0)
    f.take("layer_types", list, [])
    return {**read_decoder(f), "head_dim": f.integer("head_dim", 128), "rope_theta": plain_rope(f.rope())}


def _read(f: Fields) -> dict[str, Any]:
    return {**read_qwen3(f), "ffn_dim": f.integer("intermediate_size")}


def _write(c: Any) -> dict[str, Any]:
    return {**write_decoder(c), "intermediate_size": c.ffn_dim, "attention_bias": False, "use_sliding_window": False}


HUB = Hub(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    names={**DECODER, **NAMES, **HEAD_NORMS, **feed_forward("layers.*.ffn", "model.layers.*.mlp")},
    read=_read,
    write=_write,
    ignored=ROTARY,
)
