"""Tensor names and config.json keys that most decoder architectures share."""

from __future__ import annotations

from typing import Any

from shardtrain.hub_formats.format import ExpertTensors, Fields, Source

DECODER: dict[str, Source] = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "layers.*.attn_norm.weight": "model.layers.*.input_layernorm.weight",
    "layers.*.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.attn.wo.weight": "model.layers.*.self_attn.o_proj.weight",
}
ATTENTION: dict[str, Source] = {
    "layers.*.attn.wq.weight": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.attn.wk.weight": "model.layers.*.self_attn.k_proj.weight",
    "layers.*.attn.wv.weight": "model.layers.*.self_attn.v_proj.weight",
}
HEAD_NORMS: dict[str, Source] = {
    "layers.*.attn.q_norm.weight": "model.layers.*.self_attn.q_norm.weight",
    "layers.*.attn.k_norm.weight": "model.layers.*.self_attn.k_norm.weight",
}
ROTARY = ("*.rotary_emb.inv_freq",)
"""Buffer in older files. It is computed from config.json."""


def feed_forward(ours: str, theirs: str) -> dict[str, Source]:
    """Return the names of a gated feed-forward network, given our and the hub's module path."""
    projections = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    return {
        f"{ours}.{weight}.weight": f"{theirs}.{name}.weight" for weight, name in projections.items()
    }


def experts(
    theirs: str, w1: str = "gate_proj", w2: str = "down_proj", w3: str = "up_proj"
) -> dict[str, Source]:
    """Return the names of router and experts of each layer, below the hub's module ``theirs``."""
    return {
        "layers.*.moe.router.gate.weight": f"{theirs}.gate.weight",
        "layers.*.moe.experts.w1": ExpertTensors(f"{theirs}.experts.#.{w1}.weight"),
        "layers.*.moe.experts.w2": ExpertTensors(f"{theirs}.experts.#.{w2}.weight"),
        "layers.*.moe.experts.w3": ExpertTensors(f"{theirs}.experts.#.{w3}.weight"),
    }


DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
}
"""Defaults of the classes in ``transformers`` for missing keys of config.json."""


def read_decoder(f: Fields) -> dict[str, Any]:
    """Read the fields of a decoder with grouped-query attention."""
    dim = f.integer("hidden_size")
    heads = f.integer("num_attention_heads")
    f.only("hidden_act", "silu", "swish")
    return {
        "vocab_size": f.integer("vocab_size"),
        "dim": dim,
        "num_layers": f.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": f.integer("num_key_value_heads", heads),
        "head_dim": f.integer("head_dim", max(dim // heads, 1)),
        "norm_eps": f.number("rms_norm_eps"),
        "tied_embeddings": f.flag("tie_word_embeddings", False),
    }


def write_decoder(c: Any) -> dict[str, Any]:
    """Return the keys of config.json that ``read_decoder`` reads."""
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.dim,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied_embeddings,
        "hidden_act": "silu",
        "rope_theta": c.rope_theta,
    }
