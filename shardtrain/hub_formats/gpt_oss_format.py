"""Hugging Face format of gpt-oss. The model is in ``models/gpt_oss.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardtrain.hub_formats.decoder_names import (
    ATTENTION,
    DECODER,
    DEFAULTS,
    ROTARY,
    read_decoder,
    write_decoder,
)
from shardtrain.hub_formats.format import Fields, HubFormat, Stacked, values_of
from shardtrain.utils.errors import ConfigError

# RoPE with YaRN: field of our Config -> key of the rope_scaling table.
_YARN = {
    "rope_factor": "factor",
    "rope_original_seq_len": "original_max_position_embeddings",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_truncate": "truncate",
}
# Values of these fields without YaRN.
_NO_YARN = {
    "rope_factor": 1.0,
    "rope_original_seq_len": 4096,
    "rope_beta_fast": 32.0,
    "rope_beta_slow": 1.0,
    "rope_truncate": False,
}
_STACK = "model.layers.*.mlp.experts"


def _layer_kinds(num_layers: int, window: int) -> list[str]:
    """Return the type of each layer: windowed layers alternate with full ones, starting with a window."""
    if not window:
        return ["full_attention"] * num_layers
    pair = ("sliding_attention", "full_attention")
    return [pair[index % 2] for index in range(num_layers)]


def _read(f: Fields) -> dict[str, Any]:
    f.only("attention_bias", True)
    layers = f.integer("num_hidden_layers")
    window = f.integer("sliding_window", 0, 0)
    kinds = f.take("layer_types", list, _layer_kinds(layers, window))
    # A list without windows overrides the size of the window, which published files keep.
    if "sliding_attention" not in kinds:
        window = 0
    if kinds != _layer_kinds(layers, window):
        raise f.other(
            "layer_types do not alternate between sliding_attention and full_attention, which the native model requires"
        )
    for key in ("experts_per_token", "initial_context_length"):
        f.take(key, int, 0)  # redundant: other keys determine it
    coefficient = f.number("router_aux_loss_coef", 1e-3)
    return {
        **read_decoder(f),
        **_read_rope(f),
        "moe_ffn_dim": f.integer("intermediate_size"),
        "num_experts": f.integer("num_local_experts", f.take("num_experts", int, 128)),
        "top_k": f.integer("num_experts_per_tok"),
        "score_func": "softmax",
        "route_norm": True,
        "router_bias": True,
        "load_balance_coeff": 0.0,
        # Published files set 0.9 but disable the loss, and are fine-tuned without it.
        "balance_loss_coeff": coefficient if f.flag("output_router_logits", False) else 0.0,
        "z_loss_coeff": 0.0,
        "swiglu_alpha": f.number("swiglu_alpha", 1.702),
        "swiglu_limit": f.number("swiglu_limit", 7.0),
        "sliding_window": window,
    }


def _read_rope(f: Fields) -> dict[str, Any]:
    rope = f.rope()
    base = {"rope_theta": float(rope["rope_theta"])}
    if rope["rope_type"] == "default":
        return {**base, **_NO_YARN}
    if rope["rope_type"] != "yarn":
        raise f.other(f"rope type {rope['rope_type']!r} is not supported for gpt-oss")
    for key in ("mscale", "mscale_all_dim", "attention_factor"):
        if rope.get(key) is not None:
            raise f.other("mscale and attention_factor of rope_scaling are not supported")
    # YaRN's standard bounds, for files that do not have them.
    rope = {"beta_fast": 32.0, "beta_slow": 1.0, **rope}
    yarn: dict[str, Any] = {}
    for ours, theirs in _YARN.items():
        # The only value that is not a number.
        if theirs != "truncate":
            yarn[ours] = f.rope_number(rope, theirs)
    return {
        **base,
        **yarn,
        "rope_original_seq_len": int(yarn["rope_original_seq_len"]),
        "rope_truncate": bool(rope.get("truncate", True)),
    }


def _write(c: Any) -> dict[str, Any]:
    # The architecture has no keys for these fields.
    if c.score_func != "softmax" or not c.route_norm or not c.router_bias:
        raise ConfigError(
            "GptOssForCausalLM requires score_func=softmax, route_norm=true and router_bias=true"
        )
    yarn = {"rope_type": "yarn", **values_of(c, _YARN)}
    return {
        **write_decoder(c),
        "rope_scaling": yarn if c.rope_factor != 1.0 else None,
        "intermediate_size": c.moe_ffn_dim,
        "num_local_experts": c.num_experts,
        "num_experts_per_tok": c.top_k,
        "router_aux_loss_coef": c.balance_loss_coeff,
        "output_router_logits": c.balance_loss_coeff > 0,
        "swiglu_alpha": c.swiglu_alpha,
        "swiglu_limit": c.swiglu_limit,
        "sliding_window": c.sliding_window or None,
        "layer_types": _layer_kinds(c.num_layers, c.sliding_window),
        "attention_bias": True,
    }


def _unused(config: Mapping[str, Any]) -> set[str]:
    if config["rope_factor"] != 1.0:
        return set()
    return {*_YARN} - {"rope_factor"}


HUB = HubFormat(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    names={
        **DECODER,
        **ATTENTION,
        # Each projection has a bias with the name of its weight.
        **{
            ours.replace(".weight", ".bias"): str(name).replace(".weight", ".bias")
            for ours, name in ATTENTION.items()
        },
        "layers.*.attn.wo.bias": "model.layers.*.self_attn.o_proj.bias",
        "layers.*.attn.sinks.weight": "model.layers.*.self_attn.sinks",
        "layers.*.moe.router.gate.weight": "model.layers.*.mlp.router.weight",
        "layers.*.moe.router.gate.bias": "model.layers.*.mlp.router.bias",
        # One tensor per layer contains the gate (w1) and the up projection (w3) of all experts.
        "layers.*.moe.experts.w1": Stacked(f"{_STACK}.gate_up_proj", 0, 2, interleaved=True),
        "layers.*.moe.experts.w2": Stacked(f"{_STACK}.down_proj"),
        "layers.*.moe.experts.w3": Stacked(f"{_STACK}.gate_up_proj", 1, 2, interleaved=True),
        "layers.*.moe.experts.w1_bias": Stacked(
            f"{_STACK}.gate_up_proj_bias", 0, 2, True, transposed=False
        ),
        "layers.*.moe.experts.w2_bias": f"{_STACK}.down_proj_bias",
        "layers.*.moe.experts.w3_bias": Stacked(
            f"{_STACK}.gate_up_proj_bias", 1, 2, True, transposed=False
        ),
    },
    read=_read,
    write=_write,
    ignored=ROTARY,
    defaults={
        **DEFAULTS,
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "head_dim": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 4,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    unused=_unused,
)
