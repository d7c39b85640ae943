"""Hugging Face format of GPT-NeoX. The model is in ``models/neox.py``."""

from __future__ import annotations

from typing import Any

from shardtrain.hub_formats.decoder_names import ROTARY
from shardtrain.hub_formats.format import Fields, Heads, HubFormat, Source
from shardtrain.utils.errors import ConfigError

# Activation in config.json -> ours. Three names denote the tanh approximation.
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Our modules -> theirs. Each has a weight and a bias.
_MODULES = {
    "layers.*.attn_norm": "gpt_neox.layers.*.input_layernorm",
    "layers.*.ffn_norm": "gpt_neox.layers.*.post_attention_layernorm",
    "layers.*.attn.wo": "gpt_neox.layers.*.attention.dense",
    "layers.*.ffn.w1": "gpt_neox.layers.*.mlp.dense_h_to_4h",
    "layers.*.ffn.w2": "gpt_neox.layers.*.mlp.dense_4h_to_h",
    "norm": "gpt_neox.final_layer_norm",
}
_NAMES: dict[str, Source] = {
    "embed.weight": "gpt_neox.embed_in.weight",
    "head.weight": "embed_out.weight",
    **{
        f"{ours}.{leaf}": f"{theirs}.{leaf}"
        for ours, theirs in _MODULES.items()
        for leaf in ("weight", "bias")
    },
    # One tensor contains the queries, keys and values of each head.
    **{
        f"layers.*.attn.w{letter}.{leaf}": Heads(
            f"gpt_neox.layers.*.attention.query_key_value.{leaf}", part, 3
        )
        for part, letter in enumerate("qkv")
        for leaf in ("weight", "bias")
    },
}


def _read(f: Fields) -> dict[str, Any]:
    f.only("attention_bias", True)
    act = f.take("hidden_act", str, "gelu")
    f.only("hidden_act", *_ACTIVATIONS)
    rope = f.plain_rope("rotary_emb_base", "rotary_pct")
    dim = f.integer("hidden_size")
    heads = f.integer("num_attention_heads")
    return {
        "vocab_size": f.integer("vocab_size"),
        "dim": dim,
        "num_layers": f.integer("num_hidden_layers"),
        "num_heads": heads,
        "head_dim": dim // heads,
        "ffn_dim": f.integer("intermediate_size"),
        "hidden_act": _ACTIVATIONS[act],
        "rotary_pct": float(rope["partial_rotary_factor"]),
        "use_parallel_residual": f.flag("use_parallel_residual", True),
        "norm_eps": f.number("layer_norm_eps", 1e-5),
        "rope_theta": float(rope["rope_theta"]),
        "tied_embeddings": f.flag("tie_word_embeddings", False),
    }


def _write(c: Any) -> dict[str, Any]:
    # The architecture has no key for the size of a head.
    if c.num_heads * c.head_dim != c.dim:
        raise ConfigError(
            f"GPTNeoXForCausalLM has heads of dim / num_heads = {c.dim / c.num_heads:g}, not {c.head_dim}"
        )
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.dim,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "intermediate_size": c.ffn_dim,
        "hidden_act": "gelu" if c.hidden_act == "gelu" else "gelu_pytorch_tanh",
        "rotary_pct": c.rotary_pct,
        "rotary_emb_base": c.rope_theta,
        "use_parallel_residual": c.use_parallel_residual,
        "layer_norm_eps": c.norm_eps,
        "attention_bias": True,
        "tie_word_embeddings": c.tied_embeddings,
    }


HUB = HubFormat(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    names=_NAMES,
    read=_read,
    write=_write,
    ignored=("*.attention.bias", "*.attention.masked_bias", *ROTARY),
    defaults={
        "vocab_size": 50432,
        "hidden_size": 6144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "rotary_pct": 0.25,
    },
)
