"""Hugging Face format of DeepSeek-V3. The model is in ``models/deepseek_v3.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardtrain.hub_formats.decoder_names import DECODER, ROTARY, experts, feed_forward
from shardtrain.hub_formats.format import Fields, HubFormat, Source, values_of
from shardtrain.utils.errors import ConfigError

# Sizes: field of our Config -> key of config.json.
FIELDS = {
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
# RoPE with YaRN: field of our Config -> key of the rope_scaling table.
_YARN = {
    "rope_factor": "factor",
    "rope_original_seq_len": "original_max_position_embeddings",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "mscale": "mscale",
}
# Values of these fields without YaRN: a factor of 1 disables it, and the others then have no effect.
_NO_YARN = {
    "rope_factor": 1.0,
    "rope_original_seq_len": 4096,
    "rope_beta_fast": 32.0,
    "rope_beta_slow": 1.0,
    "mscale": 1.0,
}


def _unused(config: Mapping[str, Any]) -> set[str]:
    unused = set()
    # The choice of groups has no effect with a single group.
    if config["num_groups"] == 1:
        unused |= {"top_groups", "group_top_k"}
    if config["rope_factor"] == 1.0:
        unused |= {*_YARN} - {"rope_factor"}
    return unused


def _read(f: Fields) -> dict[str, Any]:
    # These keys change the computation in ways that the native model does not implement.
    f.only("hidden_act", "silu")
    f.only("attention_bias", False)
    f.only("rope_interleave", True)
    # The class in transformers has these values fixed, so another value would be ignored there.
    f.must_be("scoring_func", "sigmoid")
    f.must_be("topk_method", "noaux_tc")
    f.must_be("moe_layer_freq", 1)
    for key in ("num_key_value_heads", "head_dim", "num_local_experts"):
        f.take(key, int, 0)  # redundant: other keys determine it
    return {
        **read_sizes(f, FIELDS),
        "q_lora_rank": f.integer("q_lora_rank", 0, 0),
        "norm_eps": f.number("rms_norm_eps", 1e-6),
        "score_func": "sigmoid",
        "route_norm": f.flag("norm_topk_prob", True),
        "route_scale": f.number("routed_scaling_factor", 2.5),
        "group_top_k": 2,
        "load_balance_coeff": 1e-3,  # update speed of the routing bias, from the paper
        "balance_loss_coeff": f.number("aux_loss_alpha", 1e-4),
        "z_loss_coeff": 0.0,
        "tied_embeddings": f.flag("tie_word_embeddings", False),
        **read_rope(f),
    }


def read_sizes(f: Fields, names: Mapping[str, str]) -> dict[str, int]:
    """Read integers. ``names`` maps ours to theirs. Only dense layers and shared experts may be missing or 0."""
    sizes = {}
    for ours, theirs in names.items():
        if ours in ("num_dense_layers", "num_shared_experts"):
            sizes[ours] = f.integer(theirs, default=0, least=0)
        else:
            sizes[ours] = f.integer(theirs)
    return sizes


def read_rope(f: Fields) -> dict[str, Any]:
    """Read the RoPE fields of DeepSeek-V2 and V3."""
    rope = f.rope()
    base = {"rope_theta": float(rope["rope_theta"])}
    if rope["rope_type"] == "default":
        return {**base, **_NO_YARN}
    if rope["rope_type"] != "yarn":
        raise f.other(f"rope type {rope['rope_type']!r} is not supported for DeepSeek")
    # With equal values, YaRN scales only the attention scores, not the cosines and sines. The native model
    # supports only this case.
    if rope.get("mscale") is None or rope["mscale"] != rope.get("mscale_all_dim"):
        raise f.other(
            "mscale and mscale_all_dim of rope_scaling must be equal, which the native model requires"
        )
    if rope.get("truncate") is False or "attention_factor" in rope:
        raise f.other("truncate and attention_factor of rope_scaling are not supported")
    # YaRN's standard bounds, for files that do not have them.
    rope = {"beta_fast": 32.0, "beta_slow": 1.0, **rope}
    yarn: dict[str, Any] = {ours: f.rope_number(rope, theirs) for ours, theirs in _YARN.items()}
    return {**base, **yarn, "rope_original_seq_len": int(yarn["rope_original_seq_len"])}


def _write(c: Any) -> dict[str, Any]:
    # The architecture has no keys for these fields, so an export could not be read back as the same model.
    if c.score_func != "sigmoid" or not c.load_balance_coeff or c.group_top_k != 2:
        raise ConfigError(
            "DeepseekV3ForCausalLM requires score_func=sigmoid, a load_balance_coeff above 0 and group_top_k=2"
        )
    fields = {
        **write_shared(c),
        "rope_interleave": True,
        "norm_topk_prob": c.route_norm,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    # Models without such layers do not need the key.
    if c.num_nextn_predict_layers:
        fields["num_nextn_predict_layers"] = c.num_nextn_predict_layers
    return fields


def write_shared(c: Any) -> dict[str, Any]:
    """Return the keys of config.json that DeepSeek-V2 and V3 share."""
    # mscale_all_dim is equal to mscale in every model that ``read_rope`` accepts.
    yarn = {"type": "yarn", "mscale_all_dim": c.mscale, **values_of(c, _YARN)}
    return {
        **values_of(c, FIELDS),
        "num_key_value_heads": c.num_heads,
        "q_lora_rank": c.q_lora_rank or None,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": yarn if c.rope_factor != 1.0 else None,
        "routed_scaling_factor": c.route_scale,
        "aux_loss_alpha": c.balance_loss_coeff,
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": c.tied_embeddings,
    }


_NAMES: dict[str, Source] = {
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
}
# A layer for multi-token prediction has all tensors of a normal layer, and some for joining its two inputs.
_MTP_NAMES: dict[str, Source] = {
    "mtp_layers.*.join.enorm.weight": "model.layers.*.enorm.weight",
    "mtp_layers.*.join.hnorm.weight": "model.layers.*.hnorm.weight",
    "mtp_layers.*.join.eh_proj.weight": "model.layers.*.eh_proj.weight",
    "mtp_layers.*.shared_norm.weight": "model.layers.*.shared_head.norm.weight",
    **{f"mtp_{ours}": theirs for ours, theirs in _NAMES.items() if ours.startswith("layers.")},
}


def _renamed(c: Any) -> dict[str, Source]:
    """Without a latent of the queries, their projection has another name."""
    if c.q_lora_rank:
        return {}
    name = "model.layers.*.self_attn.q_proj.weight"
    return {"layers.*.attn.wq_b.weight": name, "mtp_layers.*.attn.wq_b.weight": name}


def _copies(c: Any) -> dict[str, str]:
    """Each layer of multi-token prediction repeats the embedding and the head."""
    head = "embed.weight" if c.tied_embeddings else "head.weight"
    copies = {}
    for number in range(c.num_layers, c.num_layers + c.num_nextn_predict_layers):
        copies[f"model.layers.{number}.embed_tokens.weight"] = "embed.weight"
        copies[f"model.layers.{number}.shared_head.head.weight"] = head
    return copies


HUB = HubFormat(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    names={**_NAMES, **_MTP_NAMES},
    read=_read,
    write=_write,
    ignored=ROTARY,
    defaults={
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
    },
    unused=_unused,
    renamed=_renamed,
    copies=_copies,
)
