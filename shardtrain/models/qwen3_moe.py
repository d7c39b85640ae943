"""Qwen3 with experts (Qwen team 2025): Qwen3's attention, and 128 experts per layer.
Each token uses 8 experts.

The published models balance the load only by a loss (``balance_loss_coeff``).
``load_balance_coeff`` adds a bias to the router's choice, which the Hugging Face format of these
models cannot store.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor, nn

from shardtrain.hub_formats.qwen3_moe_format import HUB
from shardtrain.layout import Depth, Draw
from shardtrain.models.layers import Decoder, NormedAttention, RotaryAngles, build_norm
from shardtrain.models.moe import EXPERT_BIAS, EXPERT_STYLES, MoE, expert_draws, routing_of
from shardtrain.models.qwen3 import ATTENTION
from shardtrain.models.qwen3 import LAYOUT as DENSE_LAYOUT
from shardtrain.models.qwen3 import Config as DenseConfig
from shardtrain.models.qwen3 import initial as dense_initial

__all__ = ["FLAVORS", "HUB", "LAYOUT", "Config", "Model", "initial"]


@dataclass(frozen=True)
class Config(DenseConfig):
    """The shape of a Qwen3 with experts, whose width is ``moe_ffn_dim``; ``ffn_dim`` is ignored."""

    # Sizes of the experts, and their routing.
    ffn_dim: int = 0
    moe_ffn_dim: int = 768
    num_experts: int = 128
    top_k: int = 8
    score_func: str = "softmax"
    route_norm: bool = True
    load_balance_coeff: float = 0.0
    balance_loss_coeff: float = 1e-3
    z_loss_coeff: float = 0.0


LAYOUT = dataclasses.replace(
    DENSE_LAYOUT, tensor={**ATTENTION, **EXPERT_STYLES}, expert="layers.*.moe", buffers=EXPERT_BIAS
)


class Qwen3MoeBlock(nn.Module):
    """One layer: attention and experts, each with a norm and a residual connection."""

    def __init__(self, c: Config) -> None:
        # The attention of the dense model, and experts instead of its feed-forward.
        super().__init__()
        self.attn_norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        self.attn = NormedAttention(c.dim, c.num_heads, c.num_kv_heads, c.head_dim, c.norm_eps)
        self.ffn_norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        self.moe = MoE(c.dim, c.moe_ffn_dim, routing_of(c))

    def forward(
        self, x_BTD: Tensor, angles: tuple[Tensor, Tensor], documents_BT: Tensor | None = None
    ) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), angles, documents_BT)
        return x_BTD + self.moe(self.ffn_norm(x_BTD), documents_BT)


class Model(Decoder):
    """A Qwen3 with experts."""

    def __init__(self, c: Config) -> None:
        rope = RotaryAngles(c.head_dim, c.rope_theta)
        norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        super().__init__(
            c.vocab_size,
            c.dim,
            rope,
            [Qwen3MoeBlock(c) for _ in range(c.num_layers)],
            norm,
            c.tied_embeddings,
        )


def initial(c: Config) -> dict[str, Draw]:
    """Return the initial distribution per parameter pattern; the first match wins."""
    depth: Depth = "layer" if c.depth_init else "total"
    return {**dense_initial(c), **expert_draws(0.02, depth)}


FLAVORS = {
    # A small model for tests.
    "debugmodel_moe": {
        "vocab_size": 2048,
        "dim": 256,
        "num_layers": 8,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 128,
        "moe_ffn_dim": 768,
        "num_experts": 64,
        "top_k": 8,
    },
    # Published sizes.
    "30B-A3B": {
        "dim": 2048,
        "num_layers": 48,
        "num_heads": 32,
        "num_kv_heads": 4,
        "moe_ffn_dim": 768,
    },
    "235B-A22B": {
        "dim": 4096,
        "num_layers": 94,
        "num_heads": 64,
        "num_kv_heads": 4,
        "moe_ffn_dim": 1536,
    },
}
