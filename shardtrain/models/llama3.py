"""Llama 3.1 and 3.2 (Dubey et al. 2024): 1B and 3B are 3.2, 8B, 70B and 405B are 3.1.

For Llama 3, which has no scaled rotary angles, set ``model.overrides.rope_scaling = "none"``.
"""

from shardtrain.models.llama import HUB, LAYOUT, Config, Model, initial

__all__ = ["FLAVORS", "HUB", "LAYOUT", "Config", "Model", "initial"]

FLAVORS = {
    # Small models for examples and tests.
    "2.6M": {
        "vocab_size": 2048,
        "dim": 192,
        "num_layers": 4,
        "num_heads": 8,
        "num_kv_heads": 8,
        "head_dim": 24,
        "ffn_dim": 512,
        "rope_theta": 500000.0,
    },
    "debugmodel": {
        "vocab_size": 2048,
        "dim": 256,
        "num_layers": 6,
        "num_heads": 16,
        "num_kv_heads": 16,
        "head_dim": 16,
        "ffn_dim": 768,
        "rope_theta": 500000.0,
    },
    # Llama 3.2.
    "1B": {
        "vocab_size": 128256,
        "dim": 2048,
        "num_layers": 16,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 64,
        "ffn_dim": 8192,
        "rope_theta": 500000.0,
        "rope_scaling": "llama3",
        "rope_scaling_factor": 32.0,
        "tied_embeddings": True,
    },
    "3B": {
        "vocab_size": 128256,
        "dim": 3072,
        "num_layers": 28,
        "num_heads": 24,
        "num_kv_heads": 8,
        "head_dim": 128,
        "ffn_dim": 8192,
        "rope_theta": 500000.0,
        "rope_scaling": "llama3",
        "rope_scaling_factor": 32.0,
        "tied_embeddings": True,
    },
    # Llama 3.1.
    "8B": {
        "vocab_size": 128256,
        "dim": 4096,
        "num_layers": 32,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "ffn_dim": 14336,
        "rope_theta": 500000.0,
        "rope_scaling": "llama3",
    },
    "70B": {
        "vocab_size": 128256,
        "dim": 8192,
        "num_layers": 80,
        "num_heads": 64,
        "num_kv_heads": 8,
        "head_dim": 128,
        "ffn_dim": 28672,
        "rope_theta": 500000.0,
        "rope_scaling": "llama3",
    },
    "405B": {
        "vocab_size": 128256,
        "dim": 16384,
        "num_layers": 126,
        "num_heads": 128,
        "num_kv_heads": 8,
        "head_dim": 128,
        "ffn_dim": 53248,
        "rope_theta": 500000.0,
        "rope_scaling": "llama3",
    },
}
