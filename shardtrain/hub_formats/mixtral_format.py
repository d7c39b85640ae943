"""Hugging Face format of Mixtral. The model is in ``models/mixtral.py``."""

from __future__ import annotations

from typing import Any

from shardtrain.hub_formats.decoder_names import (
    ATTENTION,
    DECODER,
    DEFAULTS,
    ROTARY,
    experts,
    read_decoder,
    write_decoder,
)
from shardtrain.hub_formats.format import Fields, HubFormat
from shardtrain.utils.errors import ConfigError


def _read(f: Fields) -> dict[str, Any]:
    f.only("sliding_window", None)
    return {
        **read_decoder(f),
        "rope_theta": float(f.plain_rope()["rope_theta"]),
        "moe_ffn_dim": f.integer("intermediate_size"),
        "num_experts": f.integer("num_local_experts", f.take("num_experts", int, 8)),
        "top_k": f.integer("num_experts_per_tok", 2),
        "score_func": "softmax",
        "route_norm": True,
        "load_balance_coeff": 0.0,
        "balance_loss_coeff": f.number("router_aux_loss_coef", 0.001),
        "z_loss_coeff": 0.0,
    }


def _write(c: Any) -> dict[str, Any]:
    # The architecture has no keys for these fields.
    if c.score_func != "softmax" or not c.route_norm:
        raise ConfigError(
            "score_func and route_norm other than softmax and true cannot be written to MixtralForCausalLM"
        )
    return {
        **write_decoder(c),
        "intermediate_size": c.moe_ffn_dim,
        "num_local_experts": c.num_experts,
        "num_experts_per_tok": c.top_k,
        "router_aux_loss_coef": c.balance_loss_coeff,
        "sliding_window": None,
    }


HUB = HubFormat(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    names={**DECODER, **ATTENTION, **experts("model.layers.*.block_sparse_moe", "w1", "w2", "w3")},
    read=_read,
    write=_write,
    ignored=ROTARY,
    defaults={
        **DEFAULTS,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
)
