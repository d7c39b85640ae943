"""Mixtral (Jiang et al. 2024): a Llama with 8 experts per layer. Each token uses 2 experts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from shardtrain.hub_formats.mixtral_format import HUB
from shardtrain.layout import Depth, Draw, Layout
from shardtrain.models.layers import Attention, Decoder, RotaryAngles, build_norm
from shardtrain.models.moe import EXPERT_BIAS, EXPERT_STYLES, MoE, expert_draws, routing_of

__all__ = ["FLAVORS", "HUB", "LAYOUT", "Config", "Model", "initial"]


@dataclass(frozen=True)
class Config:
    """The shape of a Mixtral; each field can be set by ``model.overrides``."""

    # Sizes.
    vocab_size: int = 32000
    dim: int = 4096
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    # Experts.
    moe_ffn_dim: int = 14336
    num_experts: int = 8
    top_k: int = 2
    score_func: str = "softmax"
    route_norm: bool = True
    load_balance_coeff: float = 0.0
    balance_loss_coeff: float = 0.02
    z_loss_coeff: float = 0.0
    # Norms, positions and initialization.
    norm_type: str = "rmsnorm"
    norm_eps: float = 1e-5
    rope_theta: float = 1000000.0
    tied_embeddings: bool = False
    depth_init: bool = True


LAYOUT = Layout(
    first=("embed",),
    layers="layers",
    last=("norm", "head"),
    tensor={
        "embed": "embed",
        "layers.*.attn_norm": "sequence",
        "layers.*.attn": "gather",
        "layers.*.attn.w[qkv]": "colwise",
        "layers.*.attn.wo": "rowwise",
        "layers.*.ffn_norm": "sequence",
        **EXPERT_STYLES,
        "norm": "sequence",
        "head": "head",
    },
    context="layers.*.attn.core",
    expert="layers.*.moe",
    buffers=EXPERT_BIAS,
)


class MixtralBlock(nn.Module):
    """One layer: attention and experts, each with a norm and a residual connection."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.attn_norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        self.attn = Attention(c.dim, c.num_heads, c.num_kv_heads, c.head_dim)
        self.ffn_norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        self.moe = MoE(c.dim, c.moe_ffn_dim, routing_of(c))

    def forward(
        self, x_BTD: Tensor, angles: tuple[Tensor, Tensor], documents_BT: Tensor | None = None
    ) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), angles, documents_BT)
        return x_BTD + self.moe(self.ffn_norm(x_BTD), documents_BT)


class Model(Decoder):
    """A Mixtral."""

    def __init__(self, c: Config) -> None:
        rope = RotaryAngles(c.head_dim, c.rope_theta)
        norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        super().__init__(
            c.vocab_size,
            c.dim,
            rope,
            [MixtralBlock(c) for _ in range(c.num_layers)],
            norm,
            c.tied_embeddings,
        )


def initial(c: Config) -> dict[str, Draw]:
    """Return the initial distribution per parameter pattern. The first match wins. The constants are Llama 3's."""
    depth: Depth = "layer" if c.depth_init else "total"
    return {
        "*norm.weight": Draw("ones"),
        "layers.*.*_norm.weight": Draw("ones"),
        "embed.weight": Draw("normal", std=c.dim**-0.5 if c.tied_embeddings else 1.0),
        "head.weight": Draw("truncated_normal", std=c.dim**-0.5, cutoff=3.0),
        "layers.*.attn.w[qkv].weight": Draw("normal", std=0.02),
        "layers.*.attn.wo.weight": Draw("normal", std=0.02, depth=depth),
        **expert_draws(0.02, depth),
    }


FLAVORS = {
    "debugmodel": {
        "vocab_size": 2048,
        "dim": 256,
        "num_layers": 6,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 16,
        "moe_ffn_dim": 384,
    },
    "8x7B": {},
    "8x22B": {"dim": 6144, "num_layers": 56, "num_heads": 48, "moe_ffn_dim": 16384},
}
