"""Qwen2.5 (Qwen team 2024): a Llama with biases on queries, keys and values.

Sizes below 7B tie the embedding to the head. Flavors have the sizes of the base models. Instruction models
from 14B have ``norm_eps`` 1e-6. No published model uses the sliding window that the Hugging Face format
allows.
"""

from shardtrain.hub_formats.qwen2_format import HUB
from shardtrain.models.llama import LAYOUT, Config, Model, initial

__all__ = ["FLAVORS", "HUB", "LAYOUT", "Config", "Model", "initial"]

FLAVORS = {
    # A small model for tests.
    "debugmodel": {
        "vocab_size": 2048,
        "dim": 256,
        "num_layers": 6,
        "num_heads": 16,
        "num_kv_heads": 4,
        "head_dim": 16,
        "ffn_dim": 768,
        "norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tied_embeddings": True,
        "qkv_bias": True,
    },
    # Sizes with tied embeddings.
    "0.5B": {
        "vocab_size": 151936,
        "dim": 896,
        "num_layers": 24,
        "num_heads": 14,
        "num_kv_heads": 2,
        "head_dim": 64,
        "ffn_dim": 4864,
        "norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tied_embeddings": True,
        "qkv_bias": True,
    },
    "1.5B": {
        "vocab_size": 151936,
        "dim": 1536,
        "num_layers": 28,
        "num_heads": 12,
        "num_kv_heads": 2,
        "head_dim": 128,
        "ffn_dim": 8960,
        "norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tied_embeddings": True,
        "qkv_bias": True,
    },
    "3B": {
        "vocab_size": 151936,
        "dim": 2048,
        "num_layers": 36,
        "num_heads": 16,
        "num_kv_heads": 2,
        "head_dim": 128,
        "ffn_dim": 11008,
        "norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tied_embeddings": True,
        "qkv_bias": True,
    },
    # Larger sizes, with a separate head and a larger vocabulary.
    "7B": {
        "vocab_size": 152064,
        "dim": 3584,
        "num_layers": 28,
        "num_heads": 28,
        "num_kv_heads": 4,
        "head_dim": 128,
        "ffn_dim": 18944,
        "norm_eps": 1e-6,
        "rope_theta": 1e6,
        "qkv_bias": True,
    },
    # From here on with a larger epsilon.
    "14B": {
        "vocab_size": 152064,
        "dim": 5120,
        "num_layers": 48,
        "num_heads": 40,
        "num_kv_heads": 8,
        "head_dim": 128,
        "ffn_dim": 13824,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "qkv_bias": True,
    },
    "32B": {
        "vocab_size": 152064,
        "dim": 5120,
        "num_layers": 64,
        "num_heads": 40,
        "num_kv_heads": 8,
        "head_dim": 128,
        "ffn_dim": 27648,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "qkv_bias": True,
    },
    "72B": {
        "vocab_size": 152064,
        "dim": 8192,
        "num_layers": 80,
        "num_heads": 64,
        "num_kv_heads": 8,
        "head_dim": 128,
        "ffn_dim": 29568,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "qkv_bias": True,
    },
}
