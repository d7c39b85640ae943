"""Hugging Face format of Qwen2.5. The model is in ``models/qwen2.py``."""

from __future__ import annotations

from typing import Any

from shardtrain.hub_formats.decoder_names import DEFAULTS, ROTARY
from shardtrain.hub_formats.format import Fields, HubFormat, Source
from shardtrain.hub_formats.llama_format import NAMES, read_llama, unused, write_llama
from shardtrain.utils.errors import ConfigError

_BIASES: dict[str, Source] = {
    f"layers.*.attn.w{ours}.bias": f"model.layers.*.self_attn.{ours}_proj.bias"
    for ours in ("q", "k", "v")
}


def _read(f: Fields) -> dict[str, Any]:
    f.full_attention()
    return {**read_llama(f), "qkv_bias": True, "sliding_window": 0}


def _write(c: Any) -> dict[str, Any]:
    # The class in transformers always has these biases, and the native model has no window.
    if not c.qkv_bias or c.sliding_window:
        raise ConfigError(
            "Qwen2ForCausalLM has biases and no window; use model.name llama3 or mistral"
        )
    return {**write_llama(c), "use_sliding_window": False}


HUB = HubFormat(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    names={**NAMES, **_BIASES},
    read=_read,
    write=_write,
    ignored=ROTARY,
    defaults={
        **DEFAULTS,
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    unused=unused,
)
