"""Create tiny folders of ``transformers`` architectures, to compare meshes with one process and with ``transformers``.

Each entry has the features that distinguish its architecture: both kinds of layer of a hybrid, grouped key-value
heads, shared experts, biases.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch

BYTES = {"pad_token_id": 0, "bos_token_id": 256, "eos_token_id": 257}
"""Special tokens of the byte tokenizer. No text contains byte 0."""
_SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.05,
    **BYTES,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2}
_HEAD_8 = {**_GROUPED, "head_dim": 8}
_SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_MLA = {
    **_GROUPED,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_GATED_DELTA_NET = {
    **_HEAD_8,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_SHARED_EXPERT = {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    # dense models with attention in every layer
    "llama": ("LlamaForCausalLM", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", _HEAD_8),
    "gemma2": ("Gemma2ForCausalLM", {**_HEAD_8, "sliding_window": 16}),
    "gemma3": ("Gemma3ForCausalLM", {**_HEAD_8, **_SLIDING}),
    "phi3": ("Phi3ForCausalLM", _GROUPED),
    "smollm3": ("SmolLM3ForCausalLM", {**_GROUPED, "no_rope_layers": [1, 0]}),
    "olmo2": ("Olmo2ForCausalLM", _GROUPED),
    "olmo3": ("Olmo3ForCausalLM", {**_GROUPED, **_SLIDING}),
    "glm4": ("Glm4ForCausalLM", _HEAD_8),
    "granite": (
        "GraniteForCausalLM",
        {
            **_GROUPED,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "cohere2": ("Cohere2ForCausalLM", {**_HEAD_8, **_SLIDING}),
    "starcoder2": ("Starcoder2ForCausalLM", _GROUPED),
    "stablelm": ("StableLmForCausalLM", _GROUPED),
    "falcon": (
        "FalconForCausalLM",
        {
            **_SMALL,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "alibi": False,
            "bias": False,
        },
    ),
    "nemotron": ("NemotronForCausalLM", _HEAD_8),
    "exaone4": ("Exaone4ForCausalLM", {**_HEAD_8, **_SLIDING}),
    "ernie4_5": ("Ernie4_5ForCausalLM", _HEAD_8),
    "seed_oss": ("SeedOssForCausalLM", _HEAD_8),
    "hunyuan_dense": ("HunYuanDenseV1ForCausalLM", _HEAD_8),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 512, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, **BYTES},
    ),
    "opt": (
        "OPTForCausalLM",
        {**_SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32},
    ),
    # experts
    "mixtral": ("MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**_HEAD_8, **_EXPERTS, "num_experts": 4}),
    "granitemoe": (
        "GraniteMoeForCausalLM",
        {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "olmoe": ("OlmoeForCausalLM", {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        {
            **_HEAD_8,
            **_EXPERTS,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeForCausalLM",
        {
            **_GROUPED,
            "moe_intermediate_size": 16,
            "moe_k": 2,
            "moe_num_experts": 4,
            "moe_num_shared_experts": 1,
        },
    ),
    "hunyuan_moe": ("HunYuanMoEV1ForCausalLM", {**_HEAD_8, "num_experts": 4, "moe_topk": 2}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            **_HEAD_8,
            **_SLIDING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **_MLA,
            **_EXPERTS,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "deepseek_v32": (
        "DeepseekV32ForCausalLM",
        {
            **_MLA,
            **_EXPERTS,
            "head_dim": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "index_topk": 8,
            "index_head_dim": 8,
            "index_n_heads": 2,
        },
    ),
    # hybrids of recurrent and attention layers
    "qwen3_next": ("Qwen3NextForCausalLM", {**_GATED_DELTA_NET, **_SHARED_EXPERT}),
    "qwen3_5": ("Qwen3_5ForCausalLM", _GATED_DELTA_NET),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", {**_GATED_DELTA_NET, **_SHARED_EXPERT}),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        {
            **_MLA,
            **_EXPERTS,
            "q_lora_rank": None,
            "num_local_experts": 4,
            "n_shared_experts": 1,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "minimax": (
        "MiniMaxForCausalLM",
        {
            **_HEAD_8,
            "num_local_experts": 4,
            "block_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "bamba": (
        "BambaForCausalLM",
        {
            **_GROUPED,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
        },
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        {
            **_HEAD_8,
            "layers_block_type": ["mamba", "attention", "moe", "mamba"],
            "num_hidden_layers": 4,
            "ssm_state_size": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
            "num_experts_per_tok": 2,
        },
    ),
    "zamba2": (
        "Zamba2ForCausalLM",
        {
            **_GROUPED,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "num_hidden_layers": 4,
            "num_mem_blocks": 1,
            "mamba_d_state": 8,
            "mamba_headdim": 8,
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "chunk_size": 16,
            "adapter_rank": 4,
        },
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        {
            **_GROUPED,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention"],
        },
    ),
}
"""Name -> class of ``transformers`` and its tiny config. The names are those of model types, or shorter."""
TABLE_ONLY: dict[str, tuple[str, dict[str, Any]]] = {
    "ministral": ("MinistralForCausalLM", {**_HEAD_8, **_SLIDING}),
    "arcee": ("ArceeForCausalLM", _GROUPED),
    "dots1": (
        "Dots1ForCausalLM",
        {
            **_HEAD_8,
            **_EXPERTS,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 16,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2ForCausalLM",
        {**_HEAD_8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "flex_olmo": (
        "FlexOlmoForCausalLM",
        {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "exaone_moe": (
        "ExaoneMoeForCausalLM",
        {
            **_HEAD_8,
            **_EXPERTS,
            **_SLIDING,
            "num_experts": 4,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        {
            **_GROUPED,
            **_EXPERTS,
            "num_experts": 4,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention"],
        },
    ),
    "jamba": (
        "JambaForCausalLM",
        {
            **_GROUPED,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            **_GROUPED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
            "layer_types": ["mamba", "attention"],
        },
    ),
    "falcon_h1": (
        "FalconH1ForCausalLM",
        {
            **_GROUPED,
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_ssm": 64,
            "mamba_n_groups": 2,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
        },
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        {
            "vocab_size": 512,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "state_size": 8,
            "chunk_size": 16,
            **BYTES,
        },
    ),
}
"""Further architectures of benchmarks/architectures.py, which no test trains."""


EXPERTS = (
    "mixtral",
    "qwen3_moe",
    "granitemoe",
    "olmoe",
    "glm4_moe",
    "ernie4_5_moe",
    "hunyuan_moe",
    "gpt_oss",
    "deepseek_v3",
    "deepseek_v32",
    "qwen3_next",
    "qwen3_5_moe",
    "kimi_linear",
    "minimax",
    "nemotron_h",
    "dots1",
    "minimax_m2",
    "flex_olmo",
    "exaone_moe",
    "lfm2_moe",
    "jamba",
    "granitemoehybrid",
)
"""Architectures with stacked experts."""
WHOLE_SEQUENCES = (
    "falcon",
    "deepseek_v32",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "kimi_linear",
    "minimax",
    "bamba",
    "nemotron_h",
    "zamba2",
    "lfm2",
)
"""Architectures that mix tokens outside of the attention function, so sequences are not split over ranks."""
WITHOUT_PLAN = ("falcon", "gpt2")
"""Architectures without a tensor-parallel plan."""
_PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types", "layers_block_type")


def layers_of(name: str) -> int:
    """Return the number of layers of an entry."""
    fields = _entry(name)[1]
    return int(fields.get("n_layer", fields.get("num_hidden_layers")))


def layered(name: str, num_layers: int) -> dict[str, Any]:
    """Return the changes of fields that give an architecture more layers of the same kinds."""
    fields = _entry(name)[1]
    changes: dict[str, Any] = {
        "n_layer" if "n_layer" in fields else "num_hidden_layers": num_layers
    }
    for key in _PER_LAYER:
        if key in fields:
            changes[key] = list(fields[key]) * (num_layers // len(fields[key]))
    return changes


def _entry(name: str) -> tuple[str, dict[str, Any]]:
    """Return the class and the tiny config of an architecture."""
    return TABLE_ONLY[name] if name in TABLE_ONLY else ARCHITECTURES[name]


def installed() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the entries of ARCHITECTURES whose class the installed ``transformers`` has."""
    import transformers

    return {name: entry for name, entry in ARCHITECTURES.items() if hasattr(transformers, entry[0])}


def hf_config(name: str, **changes: Any) -> Any:
    """Return the tiny ``transformers`` config of an architecture, with some fields changed."""
    import transformers

    class_name, fields = _entry(name)
    return getattr(transformers, class_name).config_class(**{**fields, **changes})


@functools.cache
def _folder(name: str, changes: tuple[tuple[str, Any], ...]) -> Path:
    import transformers

    cls = getattr(transformers, _entry(name)[0])
    torch.manual_seed(0)
    # configs of transformers reject tuples in the place of lists
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in changes}
    model = cls(hf_config(name, **values))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    path = Path(tempfile.mkdtemp(prefix="shardtrain-tests-")) / name
    model.save_pretrained(path)
    return path


def hf_folder(name: str, **changes: Any) -> Path:
    """Return a folder of ``save_pretrained`` with random weights, including biases and norms.

    Args:
        name: a key of ARCHITECTURES.
        changes: other values of the config's fields. They must be hashable, so a list is given as a tuple.
    """
    return _folder(name, tuple(sorted(changes.items())))
