"""Hugging Face format of Qwen3 with experts. The model is in ``models/qwen3_moe.py``."""

from __future__ import annotations

from typing import Any

from shardtrain.hub_formats.decoder_names import ATTENTION as NAMES
from shardtrain.hub_formats.decoder_names import (
    DECODER,
    DEFAULTS,
    HEAD_NORMS,
    ROTARY,
    experts,
    write_decoder,
)
from shardtrain.hub_formats.format import Fields, HubFormat
from shardtrain.hub_formats.qwen3_format import read_qwen3
from shardtrain.utils.errors import ConfigError


def read_experts(f: Fields, count: str, norm_topk_prob: bool) -> dict[str, Any]:
    """Read the fields of the experts, which Qwen3-Next shares.

    ``count`` is the name of the field with their number. ``norm_topk_prob`` is the default of this field.
    """
    f.only("decoder_sparse_step", 1)
    f.only("mlp_only_layers", [])
    f.take("intermediate_size", int, 0)  # only for layers without experts, which are not supported
    return {
        "moe_ffn_dim": f.integer("moe_intermediate_size"),
        "num_experts": f.integer(count),
        "top_k": f.integer("num_experts_per_tok"),
        "score_func": "softmax",
        "route_norm": f.flag("norm_topk_prob", norm_topk_prob),
        "load_balance_coeff": 0.0,
        "balance_loss_coeff": f.number("router_aux_loss_coef", 1e-3),
        "z_loss_coeff": 0.0,
    }


def write_experts(c: Any, architecture: str) -> dict[str, Any]:
    """Return the fields of the experts. Raises ConfigError for scores that are not a softmax."""
    if c.score_func != "softmax":
        raise ConfigError(
            f"score_func={c.score_func!r} cannot be written to the format of {architecture}"
        )
    return {
        "moe_intermediate_size": c.moe_ffn_dim,
        "intermediate_size": c.moe_ffn_dim,
        "num_experts": c.num_experts,
        "num_experts_per_tok": c.top_k,
        "norm_topk_prob": c.route_norm,
        "router_aux_loss_coef": c.balance_loss_coeff,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _read(f: Fields) -> dict[str, Any]:
    # transformers stores the number under num_local_experts, and older files have num_experts.
    count = "num_local_experts" if f.take("num_local_experts", int, 0) else "num_experts"
    return {**read_qwen3(f), **read_experts(f, count, norm_topk_prob=False), "ffn_dim": 0}


def _write(c: Any) -> dict[str, Any]:
    return {
        **write_decoder(c),
        **write_experts(c, "Qwen3MoeForCausalLM"),
        "attention_bias": False,
        "use_sliding_window": False,
    }


HUB = HubFormat(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    names={**DECODER, **NAMES, **HEAD_NORMS, **experts("model.layers.*.mlp")},
    read=_read,
    write=_write,
    ignored=ROTARY,
    defaults={
        **DEFAULTS,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
)
