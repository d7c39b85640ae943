"""Hugging Face format of Llama 4's text model. The model is in ``models/llama4.py``.

Published folders contain the multimodal model. The text model is its ``text_config`` and its tensors below
``language_model``. The rest is skipped.
"""

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
from shardtrain.hub_formats.format import Fields, HubFormat, MultimodalModel, Stacked
from shardtrain.hub_formats.llama_format import read_rope, write_rope
from shardtrain.hub_formats.llama_format import unused as unused_of_rope
from shardtrain.utils.errors import ConfigError

_STACK = "model.layers.*.feed_forward.experts"


def _interval(layers: list[bool], wanted: bool) -> int:
    """Return N if exactly every Nth layer is ``wanted``, 0 if none is, and -1 for any other pattern."""
    if wanted not in layers:
        return 0
    step = layers.index(wanted) + 1
    is_multiple = [(index + 1) % step == 0 for index in range(len(layers))]
    is_wanted = [layer == wanted for layer in layers]
    return step if is_wanted == is_multiple else -1


def _layer_kinds(has_rope: list[bool], chunk: int) -> list[str]:
    return ["chunked_attention" if flag and chunk else "full_attention" for flag in has_rope]


def _read(f: Fields) -> dict[str, Any]:
    f.only("attention_bias", False)
    # Layers with experts: a list, or every Nth layer.
    layers = f.integer("num_hidden_layers")
    step = f.integer("interleave_moe_layer_step", 1)
    every_nth = list(range(step - 1, layers, step))
    moe_layers = f.take("moe_layers", list, every_nth)
    if moe_layers != every_nth:
        # The list takes precedence over the step, as in transformers.
        marks = [index in moe_layers for index in range(layers)]
        step = _interval(marks, True)
        if step < 1 or len(moe_layers) != sum(marks):
            raise f.other("moe_layers are not every Nth layer, which the native model requires")

    # Layers with rotary positions: despite its name, true in no_rope_layers means that a layer has them, as in
    # transformers.
    interval = f.integer("no_rope_layer_interval", 4)
    has_rope = [bool(flag) for flag in f.take("no_rope_layers", list, [])]
    if has_rope and has_rope != [(index + 1) % interval != 0 for index in range(layers)]:
        interval = _interval(has_rope, False)
    if interval < 0 or len(has_rope) not in (0, layers):
        raise f.other("no_rope_layers are not every Nth layer, which the native model requires")
    # No layer reaches such an interval, so all have rotary positions. Our Config writes this as 0.
    if interval > layers:
        interval = 0

    # Layers with rotary positions use chunked attention.
    chunk = f.integer("attention_chunk_size", 0, 0)
    if not has_rope:
        has_rope = [not interval or (index + 1) % interval != 0 for index in range(layers)]
    kinds = f.take("layer_types", list, _layer_kinds(has_rope, chunk))
    if "chunked_attention" not in kinds:
        chunk = 0
    if kinds != _layer_kinds(has_rope, chunk):
        raise f.other(
            "layer_types must be chunked_attention for exactly the layers with rotary positions"
        )
    # Published files contain this key, which does not change the model.
    f.take("for_llm_compressor", bool, False)
    return {
        **read_decoder(f),
        **read_rope(f),
        "ffn_dim": f.integer("intermediate_size_mlp"),
        "moe_ffn_dim": f.integer("intermediate_size"),
        "num_experts": f.integer("num_local_experts"),
        "num_shared_experts": 1,
        "top_k": f.integer("num_experts_per_tok"),
        "interleave_moe_layer_step": step,
        "score_func": "sigmoid",
        "route_norm": False,
        "score_before_experts": True,
        "load_balance_coeff": 0.0,
        "balance_loss_coeff": f.number("router_aux_loss_coef", 1e-3),
        "z_loss_coeff": 0.0,
        "no_rope_layer_interval": interval,
        "attention_chunk_size": chunk,
        "use_qk_norm": f.flag("use_qk_norm", True),
        # Files of April 2025 have the number 4 instead of true.
        "attn_temperature_tuning": bool(f.take("attn_temperature_tuning", (bool, int), True)),
        "floor_scale": f.integer("floor_scale", 8192),
        "attn_scale": f.number("attn_scale", 0.1),
    }


def _write(c: Any) -> dict[str, Any]:
    # The architecture has no keys for these fields, and its class computes these values.
    only = {
        "score_func": "sigmoid",
        "route_norm": False,
        "score_before_experts": True,
        "num_shared_experts": 1,
    }
    wrong = []
    required = []
    for name, value in only.items():
        if getattr(c, name) != value:
            wrong.append(name)
            required.append(f"{name}={value!r}")
    if wrong:
        raise ConfigError(
            f"this model's {', '.join(wrong)} cannot be written to Llama4ForCausalLM, "
            f"which requires {', '.join(required)}"
        )
    # The interval is 0 if all layers have rotary positions.
    every = c.no_rope_layer_interval
    has_rope = [not every or (index + 1) % every != 0 for index in range(c.num_layers)]
    step = c.interleave_moe_layer_step
    return {
        **write_decoder(c),
        "rope_scaling": write_rope(c),
        "intermediate_size_mlp": c.ffn_dim,
        "intermediate_size": c.moe_ffn_dim,
        "num_local_experts": c.num_experts,
        "num_experts_per_tok": c.top_k,
        "interleave_moe_layer_step": step,
        "moe_layers": list(range(step - 1, c.num_layers, step)),
        "router_aux_loss_coef": c.balance_loss_coeff,
        "no_rope_layers": [int(flag) for flag in has_rope],
        "no_rope_layer_interval": c.no_rope_layer_interval or c.num_layers + 1,
        "attention_chunk_size": c.attention_chunk_size or None,
        "layer_types": _layer_kinds(has_rope, c.attention_chunk_size),
        "use_qk_norm": c.use_qk_norm,
        "attn_temperature_tuning": c.attn_temperature_tuning,
        "floor_scale": c.floor_scale,
        "attn_scale": c.attn_scale,
        "attention_bias": False,
    }


def _unused(config: Mapping[str, Any]) -> set[str]:
    unused = unused_of_rope(config)
    interval = config["no_rope_layer_interval"]
    if not 0 < interval <= config["num_layers"]:
        unused.add("no_rope_layer_interval")
    # With experts in every layer, no layer has a dense network.
    if config["interleave_moe_layer_step"] <= 1:
        unused.add("ffn_dim")
    # Only layers without rotary positions tune the temperature of the attention.
    if not (config["attn_temperature_tuning"] and interval):
        unused |= {"floor_scale", "attn_scale"}
    return unused


HUB = HubFormat(
    architecture="Llama4ForCausalLM",
    model_type="llama4_text",
    names={
        **DECODER,
        **ATTENTION,
        "layers.*.moe.router.gate.weight": "model.layers.*.feed_forward.router.weight",
        "layers.*.moe.experts.w1": Stacked(f"{_STACK}.gate_up_proj", 0, 2),
        "layers.*.moe.experts.w2": Stacked(f"{_STACK}.down_proj"),
        "layers.*.moe.experts.w3": Stacked(f"{_STACK}.gate_up_proj", 1, 2),
        **feed_forward("layers.*.moe.shared", "model.layers.*.feed_forward.shared_expert"),
        **feed_forward("layers.*.ffn", "model.layers.*.feed_forward"),
    },
    read=_read,
    write=_write,
    ignored=(*ROTARY, "vision_model.*", "multi_modal_projector.*"),
    defaults={
        **DEFAULTS,
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8192,
    },
    unused=_unused,
    multimodal=MultimodalModel(
        "llama4", "Llama4ForConditionalGeneration", "text_config", "language_model."
    ),
)
