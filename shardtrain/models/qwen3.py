"""Qwen3, dense (Qwen team 2025): a Llama with normalized queries and keys per head.

The models with experts are in ``qwen3_moe.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from shardtrain.hub_formats.qwen3_format import HUB
from shardtrain.layout import Depth, Draw, Layout
from shardtrain.models.layers import Decoder, FeedForward, NormedAttention, RotaryAngles, build_norm

__all__ = ["FLAVORS", "HUB", "LAYOUT", "Config", "Model", "initial"]


@dataclass(frozen=True)
class Config:
    """The shape of a Qwen3; each field can be set by ``model.overrides``."""

    # Sizes.
    vocab_size: int = 151936
    dim: int = 4096
    num_layers: int = 36
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    ffn_dim: int = 12288
    # Norms, positions and initialization.
    norm_type: str = "rmsnorm"
    norm_eps: float = 1e-6
    rope_theta: float = 1000000.0
    tied_embeddings: bool = False
    depth_init: bool = True


ATTENTION = {
    "embed": "embed",
    "layers.*.attn_norm": "sequence",
    "layers.*.attn": "gather",
    "layers.*.attn.w[qkv]": "colwise",
    "layers.*.attn.[qk]_norm": "heads",
    "layers.*.attn.wo": "rowwise",
    "layers.*.ffn_norm": "sequence",
    "norm": "sequence",
    "head": "head",
}
"""Tensor-parallel styles of all modules except the feed-forward."""

LAYOUT = Layout(
    first=("embed",),
    layers="layers",
    last=("norm", "head"),
    tensor={
        **ATTENTION,
        "layers.*.ffn": "gather",
        "layers.*.ffn.w[13]": "colwise",
        "layers.*.ffn.w2": "rowwise",
    },
    context="layers.*.attn.core",
)


class Qwen3Block(nn.Module):
    """One layer: attention and feed-forward, each with a norm and a residual connection."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.attn_norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        self.attn = NormedAttention(c.dim, c.num_heads, c.num_kv_heads, c.head_dim, c.norm_eps)
        self.ffn_norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        self.ffn = FeedForward(c.dim, c.ffn_dim)

    def forward(
        self, x_BTD: Tensor, angles: tuple[Tensor, Tensor], documents_BT: Tensor | None = None
    ) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), angles, documents_BT)
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))


class Model(Decoder):
    """A dense Qwen3."""

    def __init__(self, c: Config) -> None:
        rope = RotaryAngles(c.head_dim, c.rope_theta)
        norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        super().__init__(
            c.vocab_size,
            c.dim,
            rope,
            [Qwen3Block(c) for _ in range(c.num_layers)],
            norm,
            c.tied_embeddings,
        )


def initial(c: Config) -> dict[str, Draw]:
    """Return the initial distribution per parameter pattern. The first match wins. The constants are Llama 3's."""
    depth: Depth = "layer" if c.depth_init else "total"
    return {
        "*norm.weight": Draw("ones"),
        "layers.*.*_norm.weight": Draw("ones"),
        "layers.*.attn.[qk]_norm.weight": Draw("ones"),
        "embed.weight": Draw("normal", std=c.dim**-0.5 if c.tied_embeddings else 1.0),
        "head.weight": Draw("truncated_normal", std=c.dim**-0.5, cutoff=3.0),
        "layers.*.attn.w[qkv].weight": Draw("normal", std=0.02),
        "layers.*.attn.wo.weight": Draw("normal", std=0.02, depth=depth),
        "layers.*.ffn.w1.weight": Draw("normal", std=0.02),
        "layers.*.ffn.w[23].weight": Draw("normal", std=0.02, depth=depth),
    }


FLAVORS = {
    # A small model for tests.
    "debugmodel": {
        "vocab_size": 2048,
        "dim": 256,
        "num_layers": 8,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 128,
        "ffn_dim": 3072,
        "tied_embeddings": True,
    },
    # Published sizes. Small ones tie the embedding to the head.
    "0.6B": {
        "dim": 1024,
        "num_layers": 28,
        "num_heads": 16,
        "num_kv_heads": 8,
        "ffn_dim": 3072,
        "tied_embeddings": True,
    },
    "1.7B": {
        "dim": 2048,
        "num_layers": 28,
        "num_heads": 16,
        "num_kv_heads": 8,
        "ffn_dim": 6144,
        "tied_embeddings": True,
    },
    "4B": {
        "dim": 2560,
        "num_layers": 36,
        "num_heads": 32,
        "num_kv_heads": 8,
        "ffn_dim": 9728,
        "tied_embeddings": True,
    },
    "8B": {"dim": 4096, "num_layers": 36, "num_heads": 32, "num_kv_heads": 8, "ffn_dim": 12288},
    "14B": {"dim": 5120, "num_layers": 40, "num_heads": 40, "num_kv_heads": 8, "ffn_dim": 17408},
    "32B": {"dim": 5120, "num_layers": 64, "num_heads": 64, "num_kv_heads": 8, "ffn_dim": 25600},
}
