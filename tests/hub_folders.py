"""Create tiny random models of ``transformers``, saved as config.json and safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LATENT = {
    **SIZES,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2}
LLAMA4 = {
    **GROUPED,
    "num_hidden_layers": 4,
    "head_dim": 8,
    "intermediate_size": 16,
    "intermediate_size_mlp": 48,
    "num_local_experts": 4,
    "no_rope_layer_interval": 2,
    "attention_chunk_size": 7,
    "floor_scale": 5,
}
GPT_OSS = {
    **GROUPED,
    "head_dim": 8,
    "intermediate_size": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
QWEN3_NEXT = {
    **EXPERTS,
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {**SIZES, "num_key_value_heads": 4}),
    "llama3": ("Llama", {**GROUPED, "rope_parameters": LLAMA3_ROPE}),
    "llama3-tied": ("Llama", {**GROUPED, "tie_word_embeddings": True}),
    "llama4": ("Llama4", {**LLAMA4, "rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 1.0}}),
    "llama4-interleaved": (
        "Llama4",
        {**LLAMA4, "interleave_moe_layer_step": 2, "use_qk_norm": False, "num_experts_per_tok": 2},
    ),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": 7}),
    "qwen2": ("Qwen2", {**GROUPED, "tie_word_embeddings": True}),
    "gpt_oss": ("GptOss", GPT_OSS),
    "neox": ("GPTNeoX", SIZES),
    "neox-sequential": (
        "GPTNeoX",
        {**SIZES, "use_parallel_residual": False, "hidden_act": "gelu_new"},
    ),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 8, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**EXPERTS, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16},
    ),
    "qwen3_next": ("Qwen3Next", QWEN3_NEXT),
    "mixtral": ("Mixtral", {**EXPERTS, "num_local_experts": 4}),
    "deepseek_v2": (
        "DeepseekV2",
        {**LATENT, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
    ),
    "deepseek_v2-greedy": (
        "DeepseekV2",
        {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 0},
    ),
    "deepseek_v3": ("DeepseekV3", LATENT),
    "deepseek_v3-plain-queries": ("DeepseekV3", {**LATENT, "q_lora_rank": None}),
}


CONFIGS = {"Llama4": "Llama4TextConfig"}
"""Configuration classes whose names differ from that of the model."""


def build(family: str, seed: int = 0, **changed: Any) -> Any:
    """Return a model with random weights, norms and biases, far from the initial weights of the library."""
    import transformers

    name, fields = FAMILIES[family]
    config_class = getattr(transformers, CONFIGS.get(name, f"{name}Config"))
    config = config_class(**{**fields, **changed})
    model_class = getattr(transformers, f"{name}ForCausalLM")
    model = model_class._from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if not tensor.is_floating_point():
                continue
            scale = 0.2 if tensor.ndim > 1 else 0.1
            tensor.copy_(scale * torch.randn(tensor.shape, generator=generator))
            # Norms and biases.
            if tensor.ndim == 1:
                tensor += 1.0
    return model.float().eval()


def save(model: Any, folder: Path, shard_bytes: int = 10**9) -> Path:
    """Save a model with ``save_pretrained``. A small ``shard_bytes`` creates several files and an index."""
    model.save_pretrained(folder, max_shard_size=shard_bytes)
    return folder
