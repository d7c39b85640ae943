"""Hugging Face format of Llama, with the parts that Mistral and Qwen2.5 share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardtrain.hub_formats.decoder_names import (
    ATTENTION,
    DECODER,
    DEFAULTS,
    ROTARY,
    feed_forward,
    read_decoder,
    write_decoder,
)
from shardtrain.hub_formats.format import Fields, HubFormat, values_of
from shardtrain.utils.errors import ConfigError

# Scaled RoPE: field of our Config -> key of the rope_scaling table.
_SCALED = {
    "rope_scaling_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_seq_len": "original_max_position_embeddings",
}
# Values of these fields without scaling. They have no effect then.
_UNSCALED = {
    "rope_scaling_factor": 8.0,
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "rope_original_seq_len": 8192,
}
# Fields that each RoPE type requires.
_NEEDED = {"none": [], "linear": ["rope_scaling_factor"], "llama3": [*_SCALED]}


def unused(config: Mapping[str, Any]) -> set[str]:
    """Return the fields that the RoPE type does not use."""
    return set(_SCALED) - set(_NEEDED[config["rope_scaling"]])


def read_llama(f: Fields) -> dict[str, Any]:
    """Read the fields that Llama, Mistral and Qwen2.5 share from ``config.json``."""
    return {**read_decoder(f), "ffn_dim": f.integer("intermediate_size"), **read_rope(f)}


def read_rope(f: Fields) -> dict[str, Any]:
    """Read the RoPE fields."""
    rope = f.rope()
    kind = {"default": "none"}.get(rope["rope_type"], rope["rope_type"])
    if kind not in _NEEDED:
        raise f.other(
            f"rope type {kind!r} is not supported for Llama; supported are default, linear and llama3"
        )
    # Read only the keys of this type: another type's keys may be present and have no effect.
    scaled: dict[str, Any] = {ours: f.rope_number(rope, _SCALED[ours]) for ours in _NEEDED[kind]}
    if "rope_original_seq_len" in scaled:
        scaled["rope_original_seq_len"] = int(scaled["rope_original_seq_len"])
    return {"rope_theta": float(rope["rope_theta"]), "rope_scaling": kind, **_UNSCALED, **scaled}


def write_llama(c: Any) -> dict[str, Any]:
    """Return the keys of ``config.json`` that ``read_llama`` reads."""
    return {**write_decoder(c), "intermediate_size": c.ffn_dim, "rope_scaling": write_rope(c)}


def write_rope(c: Any) -> dict[str, Any] | None:
    """Return the ``rope_scaling`` table of config.json, or None if RoPE is not scaled."""
    if c.rope_scaling == "linear":
        return {"rope_type": "linear", "factor": c.rope_scaling_factor}
    if c.rope_scaling == "llama3":
        return {"rope_type": "llama3", **values_of(c, _SCALED)}
    return None


NAMES = {**DECODER, **ATTENTION, **feed_forward("layers.*.ffn", "model.layers.*.mlp")}


def _read(f: Fields) -> dict[str, Any]:
    f.only("attention_bias", False)
    f.only("mlp_bias", False)
    return {**read_llama(f), "qkv_bias": False, "sliding_window": 0}


def _write(c: Any) -> dict[str, Any]:
    if c.qkv_bias or c.sliding_window:
        raise ConfigError(
            "qkv_bias and sliding_window cannot be written to LlamaForCausalLM; use model.name qwen2 or mistral"
        )
    return {**write_llama(c), "attention_bias": False, "mlp_bias": False}


HUB = HubFormat(
    architecture="LlamaForCausalLM",
    model_type="llama",
    names=NAMES,
    read=_read,
    write=_write,
    ignored=ROTARY,
    defaults={**DEFAULTS, "intermediate_size": 11008},
    unused=unused,
)
