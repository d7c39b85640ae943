"""The Llama architecture: pre-norm decoder with rotary grouped-query attention and SwiGLU (Touvron
et al. 2023).

The sizes are in ``llama2.py`` and ``llama3.py``. ``mistral.py`` (sliding window) and ``qwen2.py``
(biases) also use this architecture. Nothing here depends on parallelism; ``LAYOUT`` specifies how
the model is sharded.
Shape suffixes: B batch, T tokens, D model.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from shardtrain.hub_formats.llama_format import HUB
from shardtrain.layout import Depth, Draw, Layout
from shardtrain.models.layers import Attention, Decoder, FeedForward, RotaryAngles, build_norm

__all__ = ["HUB", "LAYOUT", "Config", "Model", "initial"]


@dataclass(frozen=True)
class Config:
    """The shape of a Llama. ``model.overrides`` can set each field.

    ``qkv_bias`` adds a bias to the projections of queries, keys and values. ``sliding_window`` is
    the number of tokens that a token attends to, including itself; 0 means no window.
    """

    # Sizes.
    vocab_size: int = 32000
    dim: int = 4096
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 32
    head_dim: int = 128
    ffn_dim: int = 11008
    # Norms and positions.
    norm_type: str = "rmsnorm"
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: str = "none"
    rope_scaling_factor: float = 8.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_seq_len: int = 8192
    # Variations of other models.
    tied_embeddings: bool = False
    depth_init: bool = True
    qkv_bias: bool = False
    sliding_window: int = 0


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
        "layers.*.ffn": "gather",
        "layers.*.ffn.w[13]": "colwise",
        "layers.*.ffn.w2": "rowwise",
        "norm": "sequence",
        "head": "head",
    },
    context="layers.*.attn.core",
)


class LlamaBlock(nn.Module):
    """One layer: attention and feed-forward, each with a norm and a residual connection."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.attn_norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        self.attn = Attention(
            c.dim, c.num_heads, c.num_kv_heads, c.head_dim, c.qkv_bias, c.sliding_window
        )
        self.ffn_norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        self.ffn = FeedForward(c.dim, c.ffn_dim)

    def forward(
        self, x_BTD: Tensor, angles: tuple[Tensor, Tensor], documents_BT: Tensor | None = None
    ) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), angles, documents_BT)
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))


class Model(Decoder):
    """The Llama model: Llama 2 and 3, and other models of the same architecture."""

    def __init__(self, c: Config) -> None:
        rope = RotaryAngles(
            c.head_dim,
            c.rope_theta,
            c.rope_scaling,
            c.rope_scaling_factor,
            c.rope_low_freq_factor,
            c.rope_high_freq_factor,
            c.rope_original_seq_len,
        )
        layers = (LlamaBlock(c) for _ in range(c.num_layers))
        norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        super().__init__(c.vocab_size, c.dim, rope, layers, norm, c.tied_embeddings)


def initial(c: Config) -> dict[str, Draw]:
    """Return the initial distribution per parameter pattern; the first match wins.

    The constants are torchtitan's for Llama 3.
    """
    depth: Depth = "layer" if c.depth_init else "total"
    # A tied embedding is also the head, so it starts with the head's smaller deviation.
    return {
        "*norm.weight": Draw("ones"),
        "layers.*.*_norm.weight": Draw("ones"),
        "embed.weight": Draw("normal", std=c.dim**-0.5 if c.tied_embeddings else 1.0),
        "head.weight": Draw("truncated_normal", std=c.dim**-0.5, cutoff=3.0),
        "layers.*.attn.w[qkv].weight": Draw("normal", std=0.02),
        "layers.*.attn.w[qkv].bias": Draw("zeros"),
        "layers.*.attn.wo.weight": Draw("normal", std=0.02, depth=depth),
        "layers.*.ffn.w1.weight": Draw("normal", std=0.02),
        "layers.*.ffn.w[23].weight": Draw("normal", std=0.02, depth=depth),
    }
