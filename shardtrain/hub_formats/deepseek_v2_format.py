"""Hugging Face format of DeepSeek-V2. The model is in ``models/deepseek_v2.py``."""

from __future__ import annotations

import dataclasses
from typing import Any

from shardtrain.hub_formats import deepseek_v3_format
from shardtrain.hub_formats.format import Fields
from shardtrain.utils.errors import ConfigError


def _read(f: Fields) -> dict[str, Any]:
    f.only("hidden_act", "silu")
    f.only("attention_bias", False)
    f.only("mlp_bias", False)
    f.must_be("scoring_func", "softmax")
    f.must_be("norm_topk_prob", False)
    f.must_be("moe_layer_freq", 1)
    for key in ("num_key_value_heads", "head_dim", "num_experts"):
        f.take(key, int, 0)  # redundant: other keys determine it
    method = f.take("topk_method", str, "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise f.other(f"topk_method={method!r} is not one of greedy and group_limited_greedy")
    grouped = method == "group_limited_greedy"
    # Read both even without groups. Otherwise they would be reported as unknown keys.
    num_groups = f.integer("n_group", 1)
    top_groups = f.integer("topk_group", 1)
    # These three have other defaults than in V3, and are read below.
    sizes = dict(deepseek_v3_format.FIELDS)
    for ours in ("num_groups", "top_groups", "top_k"):
        del sizes[ours]
    return {
        **deepseek_v3_format.read_sizes(f, sizes),
        "num_groups": num_groups if grouped else 1,
        "top_groups": top_groups if grouped else 1,
        # 6 as in all published models, because transformers has no default
        "top_k": f.integer("num_experts_per_tok", 6),
        "q_lora_rank": f.integer("q_lora_rank", 0, 0),
        "norm_eps": f.number("rms_norm_eps", 1e-6),
        "score_func": "softmax",
        "route_norm": False,
        "route_scale": f.number("routed_scaling_factor", 1.0),
        "group_top_k": 1,
        "load_balance_coeff": 0.0,
        "balance_loss_coeff": f.number("aux_loss_alpha", 1e-3),
        "z_loss_coeff": 0.0,
        "tied_embeddings": f.flag("tie_word_embeddings", False),
        **deepseek_v3_format.read_rope(f),
    }


def _write(c: Any) -> dict[str, Any]:
    # The architecture has no keys for these fields.
    if c.score_func != "softmax" or c.route_norm or (c.num_groups > 1 and c.group_top_k != 1):
        raise ConfigError(
            "score_func, route_norm or group_top_k of this model cannot be written to DeepseekV2ForCausalLM, which has "
            '"softmax", false, and 1'
        )
    return {
        **deepseek_v3_format.write_shared(c),
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "topk_method": "group_limited_greedy" if c.num_groups > 1 else "greedy",
        "mlp_bias": False,
    }


HUB = dataclasses.replace(
    deepseek_v3_format.HUB,
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    names={
        name: source
        for name, source in deepseek_v3_format.HUB.names.items()
        if not name.endswith("expert_bias") and not name.startswith("mtp_")
    },
    copies=lambda _: {},
    read=_read,
    write=_write,
    defaults={
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "moe_intermediate_size": 1407,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
    },
)
