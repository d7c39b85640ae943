"""Llama 2 (Touvron et al. 2023): the sizes of torchtrain and torchtitan.

7B, 13B and 70B are Meta's; 271M, 1B and 26B are torchtitan's. TinyLlama-1.1B is a small model with
the same vocabulary (Zhang et al. 2024).
"""

from shardtrain.models.llama import HUB, LAYOUT, Config, Model, initial

__all__ = ["FLAVORS", "HUB", "LAYOUT", "Config", "Model", "initial"]

FLAVORS = {
    "debugmodel": {
        "dim": 256,
        "num_layers": 8,
        "num_heads": 16,
        "num_kv_heads": 16,
        "head_dim": 16,
        "ffn_dim": 768,
        "vocab_size": 32000,
    },
    "271M": {
        "dim": 1024,
        "num_layers": 16,
        "num_heads": 8,
        "num_kv_heads": 8,
        "head_dim": 128,
        "ffn_dim": 2816,
    },
    "1B": {
        "dim": 2048,
        "num_layers": 18,
        "num_heads": 16,
        "num_kv_heads": 16,
        "head_dim": 128,
        "ffn_dim": 5632,
    },
    "TinyLlama-1.1B": {
        "dim": 2048,
        "num_layers": 22,
        "num_heads": 32,
        "num_kv_heads": 4,
        "head_dim": 64,
        "ffn_dim": 5632,
    },
    "7B": {
        "dim": 4096,
        "num_layers": 32,
        "num_heads": 32,
        "num_kv_heads": 32,
        "head_dim": 128,
        "ffn_dim": 11008,
    },
    "13B": {
        "dim": 5120,
        "num_layers": 40,
        "num_heads": 40,
        "num_kv_heads": 40,
        "head_dim": 128,
        "ffn_dim": 13824,
    },
    "26B": {
        "dim": 5120,
        "num_layers": 80,
        "num_heads": 40,
        "num_kv_heads": 40,
        "head_dim": 128,
        "ffn_dim": 13824,
    },
    "70B": {
        "dim": 8192,
        "num_layers": 80,
        "num_heads": 64,
        "num_kv_heads": 8,
        "head_dim": 128,
        "ffn_dim": 28672,
    },
}
