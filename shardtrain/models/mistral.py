"""Mistral (Jiang et al. 2023): a Llama with few key-value heads.

Version 0.1 attends within a sliding window; later versions and Nemo do not. ``sliding_window`` is
the number of tokens that a token attends to, including itself.
"""

from shardtrain.hub_formats.mistral_format import HUB
from shardtrain.models.llama import LAYOUT, Config, Model, initial

__all__ = ["FLAVORS", "HUB", "LAYOUT", "Config", "Model", "initial"]

FLAVORS = {
    "debugmodel": {
        "vocab_size": 2048,
        "dim": 256,
        "num_layers": 6,
        "num_heads": 16,
        "num_kv_heads": 4,
        "head_dim": 16,
        "ffn_dim": 768,
        "sliding_window": 64,
    },
    "7B-v0.1": {"num_kv_heads": 8, "ffn_dim": 14336, "sliding_window": 4096},
    "7B-v0.2": {"num_kv_heads": 8, "ffn_dim": 14336, "rope_theta": 1e6},
    "7B-v0.3": {"vocab_size": 32768, "num_kv_heads": 8, "ffn_dim": 14336, "rope_theta": 1e6},
    "Nemo-12B": {
        "vocab_size": 131072,
        "dim": 5120,
        "num_layers": 40,
        "num_kv_heads": 8,
        "ffn_dim": 14336,
        "rope_theta": 1e6,
    },
}
