"""DeepSeek-V2 (DeepSeek-AI 2024): DeepSeek-V3 with softmax scores and no expert bias.

The score of a group of experts is that of its best expert.

The published models balance the load only by losses. ``load_balance_coeff`` adds a bias to the
router's choice, which the Hugging Face format of these models cannot store.
"""

from shardtrain.hub_formats.deepseek_v2_format import HUB
from shardtrain.models.deepseek_v3 import LAYOUT, Config, Model, initial

__all__ = ["FLAVORS", "HUB", "LAYOUT", "Config", "Model", "initial"]

FLAVORS = {
    "debugmodel": {
        "vocab_size": 2048,
        "dim": 256,
        "num_layers": 6,
        "num_dense_layers": 1,
        "num_heads": 16,
        "q_lora_rank": 0,
        "kv_lora_rank": 512,
        "ffn_dim": 1024,
        "moe_ffn_dim": 256,
        "num_experts": 8,
        "num_shared_experts": 2,
        "top_k": 3,
        "score_func": "softmax",
        "route_norm": False,
        "route_scale": 1.0,
        "num_groups": 1,
        "top_groups": 1,
        "group_top_k": 1,
        "load_balance_coeff": 0.0,
        "balance_loss_coeff": 1e-3,
        "mscale": 0.707,
        "init_std": 0.02,
    },
    "16B": {
        "vocab_size": 102400,
        "dim": 2048,
        "num_layers": 27,
        "num_dense_layers": 1,
        "num_heads": 16,
        "q_lora_rank": 0,
        "ffn_dim": 10944,
        "moe_ffn_dim": 1408,
        "num_experts": 64,
        "num_shared_experts": 2,
        "top_k": 6,
        "score_func": "softmax",
        "route_norm": False,
        "route_scale": 1.0,
        "num_groups": 1,
        "top_groups": 1,
        "group_top_k": 1,
        "load_balance_coeff": 0.0,
        "balance_loss_coeff": 1e-3,
        "mscale": 0.707,
    },
    "236B": {
        "vocab_size": 102400,
        "dim": 5120,
        "num_layers": 60,
        "num_dense_layers": 1,
        "ffn_dim": 12288,
        "moe_ffn_dim": 1536,
        "num_experts": 160,
        "num_shared_experts": 2,
        "top_k": 6,
        "score_func": "softmax",
        "route_norm": False,
        "route_scale": 16.0,
        "num_groups": 8,
        "top_groups": 3,
        "group_top_k": 1,
        "load_balance_coeff": 0.0,
        "balance_loss_coeff": 3e-3,
        "mscale": 0.707,
    },
}
