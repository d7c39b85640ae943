"""Hugging Face format of Qwen3-Next. The model is in ``models/qwen3_next.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardtrain.hub_formats.decoder_names import ATTENTION as NAMES
from shardtrain.hub_formats.decoder_names import (
    DECODER,
    DEFAULTS,
    HEAD_NORMS,
    ROTARY,
    experts,
    feed_forward,
    read_decoder,
    write_decoder,
)
from shardtrain.hub_formats.format import Fields, HeadGroups, HubFormat, Source
from shardtrain.hub_formats.qwen3_moe_format import read_experts, write_experts

_DELTA = "model.layers.*.linear_attn"
_MLP = "model.layers.*.mlp"
_LAYER_TYPES = ("linear_attention", "full_attention")


def _interval(f: Fields, num_layers: int) -> int:
    """Return the interval of layers with attention. Older files have this number, and newer files a list of types.

    Raises:
        OnlyInTransformers: the list is not regular.
    """
    interval = f.integer("full_attention_interval", 4)
    listed = f.take("layer_types", list, [])
    if not listed:
        return interval
    # The native model needs one number, so only a regular list can be converted.
    first = listed.index("full_attention") + 1 if "full_attention" in listed else num_layers + 1
    if listed != layer_types(num_layers, first):
        raise f.other(
            "layer_types must have full_attention in every n-th layer and linear_attention in the others"
        )
    # If no layer has attention, all intervals above the number of layers are equivalent.
    return interval if layer_types(num_layers, interval) == listed else first


def layer_types(num_layers: int, interval: int) -> list[str]:
    """Return the type of each layer.

    >>> layer_types(3, 2)
    ['linear_attention', 'full_attention', 'linear_attention']
    """
    return [_LAYER_TYPES[(i + 1) % interval == 0] for i in range(num_layers)]


def _read(f: Fields) -> dict[str, Any]:
    f.only("attention_bias", False)
    f.take("use_sliding_window", bool, False)  # published files have it, and no layer has a window
    rope = f.plain_rope(share="partial_rotary_factor")
    decoder = read_decoder(f)
    return {
        **decoder,
        "full_attention_interval": _interval(f, decoder["num_layers"]),
        "rope_theta": float(rope["rope_theta"]),
        "rotary_pct": float(rope["partial_rotary_factor"]),
        "linear_key_heads": f.integer("linear_num_key_heads"),
        "linear_value_heads": f.integer("linear_num_value_heads"),
        "linear_key_head_dim": f.integer("linear_key_head_dim"),
        "linear_value_head_dim": f.integer("linear_value_head_dim"),
        "linear_conv_width": f.integer("linear_conv_kernel_dim"),
        **read_experts(f, "num_experts", norm_topk_prob=True),
        "shared_ffn_dim": f.integer("shared_expert_intermediate_size"),
    }


def _write(c: Any) -> dict[str, Any]:
    return {
        **write_decoder(c),
        **write_experts(c, "Qwen3NextForCausalLM"),
        "partial_rotary_factor": c.rotary_pct,
        "full_attention_interval": c.full_attention_interval,
        "layer_types": layer_types(c.num_layers, c.full_attention_interval),
        "linear_num_key_heads": c.linear_key_heads,
        "linear_num_value_heads": c.linear_value_heads,
        "linear_key_head_dim": c.linear_key_head_dim,
        "linear_value_head_dim": c.linear_value_head_dim,
        "linear_conv_kernel_dim": c.linear_conv_width,
        "shared_expert_intermediate_size": c.shared_ffn_dim,
        "attention_bias": False,
    }


def _filters(c: Any) -> Mapping[str, Source]:
    """Return the location of the filters. Theirs are ordered by part: queries, keys, values. Ours by key head."""
    values = c.linear_value_heads // c.linear_key_heads * c.linear_value_head_dim
    widths = (c.linear_key_head_dim, c.linear_key_head_dim, values)
    return {"layers.*.delta.filters.weight": HeadGroups(f"{_DELTA}.conv1d.weight", widths)}


HUB = HubFormat(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    names={
        **DECODER,
        **NAMES,
        **HEAD_NORMS,
        "layers.*.delta.wqkvz.weight": f"{_DELTA}.in_proj_qkvz.weight",
        "layers.*.delta.wba.weight": f"{_DELTA}.in_proj_ba.weight",
        "layers.*.delta.a_log.weight": f"{_DELTA}.A_log",
        "layers.*.delta.dt_bias.weight": f"{_DELTA}.dt_bias",
        "layers.*.delta.norm.weight": f"{_DELTA}.norm.weight",
        "layers.*.delta.wo.weight": f"{_DELTA}.out_proj.weight",
        **experts(_MLP),
        **feed_forward("layers.*.moe.shared", f"{_MLP}.shared_expert"),
        "layers.*.moe.shared_gate.weight": f"{_MLP}.shared_expert_gate.weight",
    },
    read=_read,
    write=_write,
    ignored=(*ROTARY, "mtp.*"),
    renamed=_filters,
    defaults={
        **DEFAULTS,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    },
)
