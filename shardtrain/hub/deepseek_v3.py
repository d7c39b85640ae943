"""DeepSeek-V3 in the format of the Hugging Face hub; the model is in ``models/deepseek_v3.py``."""

from __future__ import annotations

from typing import Any

from shardtrain.errors import ConfigError
from shardtrain.hub.format import Fields, Hub
from shardtrain.hub.words import DECODER, ROTARY, experts, feed_forward

_FIELDS = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_dense_layers": "first_k_dense_replace",
    "num_heads": "num_attention_heads",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "ffn_dim": "intermediate_size",
    "moe_ffn_dim": "moe_intermediate_size",
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "top_k": "num_experts_per_tok",
    "num_groups": "n_group",
    "top_groups": "topk_group",
}
_YARN = {
    "rope_factor": "factor",
    "rope_original_seq_len": "original_max_position_embeddings",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "mscale": "mscale",
}


_YARN_DEFAULTS = {
    "rope_factor": 40.0,
    "rope_original_seq_len": 4096,
    "rope_beta_fast": 32.0,
    "rope_beta_slow": 1.0,
    "mscale": 1.0,
}


def _read(f: Fields) -> dict[str, Any]:
    rope = f.rope()
    for key, allowed in (
        ("hidden_act", ["silu"]),
        ("attention_bias", [False]),
        ("scoring_func", ["sigmoid"]),
        ("topk_method", ["noaux_tc"]),
        ("rope_interleave", [True]),
        ("moe_layer_freq", [1]),
    ):
        f.only(key, *allowed)
    for key in ("num_key_value_heads", "head_dim"):
        f.take(key, int, 0)  # repeat what other keys say
    yarn: dict[str, Any] = {"rope_factor": 1.0}
    if rope["rope_type"] == "yarn":
        yarn = {ours: float(rope.get(theirs, _YARN_DEFAULTS[ours])) for ours, theirs in _YARN.items()}
        yarn["rope_original_seq_len"] = int(yarn["rope_original_seq_len"])
        if rope.get("mscale_all_dim", yarn["mscale"]) != yarn["mscale"]:
            raise ConfigError("config.json: mscale and mscale_all_dim differ, which is not known here")
    elif rope["rope_type"] != "default":
        raise ConfigError(f"config.json: rope type {rope['rope_type']!r} is not known for a DeepSeek-V3")
    return {
        **{ours: f.integer(theirs) for ours, theirs in _FIELDS.items()},
        "q_lora_rank": f.take("q_lora_rank", int, 0),
        "norm_eps": f.number("rms_norm_eps", 1e-6),
        "rope_theta": float(rope["rope_theta"]),
        "route_norm": f.flag("norm_topk_prob", True),
        "route_scale": f.number("routed_scaling_factor", 2.5),
        "tied_embeddings": f.flag("tie_word_embeddings", False),
        **yarn,
    }


def _write(c: Any) -> dict[str, Any]:
    if c.score_func != "sigmoid" or not c.load_balance_coeff or c.group_top_k != 2:
        raise ConfigError(
            "score_func, load_balance_coeff or group_top_k of this model have no place in DeepseekV3ForCausalLM, which "
            'has "sigmoid", a bias of the choice, and 2'
        )
    yarn = {"type": "yarn", "mscale_all_dim": c.mscale, **{theirs: getattr(c, ours) for ours, theirs in _YARN.items()}}
    return {
        **{theirs: getattr(c, ours) for ours, theirs in _FIELDS.items()},
        "num_key_value_heads": c.num_heads,
        "q_lora_rank": c.q_lora_rank or None,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": yarn if c.rope_factor != 1.0 else None,
        "rope_interleave": True,
        "norm_topk_prob": c.route_norm,
        "routed_scaling_factor": c.route_scale,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": c.tied_embeddings,
    }


HUB = Hub(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    names={
        **DECODER,
        "layers.*.attn.wq_a.weight": "model.layers.*.self_attn.q_a_proj.weight",
        "layers.*.attn.q_norm.weight": "model.layers.*.self_attn.q_a_layernorm.weight",
        "layers.*.attn.wq_b.weight": "model.layers.*.self_attn.q_b_proj.weight",
        "layers.*.attn.wkv_a.weight": "model.layers.*.self_attn.kv_a_proj_with_mqa.weight",
        "layers.*.attn.kv_norm.weight": "model.layers.*.self_attn.kv_a_layernorm.weight",
        "layers.*.attn.wkv_b.weight": "model.layers.*.self_attn.kv_b_proj.weight",
        "layers.*.moe.router.expert_bias": "model.layers.*.mlp.gate.e_score_correction_bias",
        **experts("model.layers.*.mlp"),
        **feed_forward("layers.*.moe.shared", "model.layers.*.mlp.shared_experts"),
        **feed_forward("layers.*.ffn", "model.layers.*.mlp"),
    },
    read=_read,
    write=_write,
    ignored=ROTARY,
    renamed=lambda c: {} if c.q_lora_rank else {"layers.*.attn.wq_b.weight": "model.layers.*.self_attn.q_proj.weight"},
)
