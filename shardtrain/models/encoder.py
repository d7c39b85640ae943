"""Bidirectional transformer encoder for training classifiers from scratch: each token attends to
its entire row.

Like the decoders it has pre-norm layers with rotary positions and SwiGLU. Dropout follows the
embedding, each attention and each feed-forward (Srivastava et al. 2014). ``documents_BT`` excludes
padding.
Shape suffixes: B batch, T tokens, D model, N heads, K key-value heads, H head.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout
from shardtrain.models.layers import (
    Attention,
    AttentionCore,
    Decoder,
    FeedForward,
    RotaryAngles,
    build_norm,
)

CAUSAL = False
"""False because tokens attend to later tokens. The model can classify, but cannot predict the next token."""


@dataclass(frozen=True)
class Config:
    """The shape of an encoder; each field can be set by ``model.overrides``."""

    vocab_size: int = 512
    dim: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 64
    ffn_dim: int = 512
    norm_type: str = "rmsnorm"
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    dropout: float = 0.1


FLAVORS = {
    "debugmodel": {
        "dim": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 16,
        "ffn_dim": 128,
    },
    "small": {
        "vocab_size": 8192,
        "dim": 128,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 32,
        "ffn_dim": 256,
    },
    "base": {
        "vocab_size": 32768,
        "dim": 768,
        "num_layers": 12,
        "num_heads": 12,
        "num_kv_heads": 12,
        "ffn_dim": 2048,
    },
}

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
)


class FullAttentionCore(AttentionCore):
    """Compute softmax(q k / sqrt(H)) v over all tokens of the same document, including later ones."""

    def forward(
        self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, documents_BT: Tensor | None = None
    ) -> Tensor:
        """Attend with queries (B, T, N, H) to keys and values (B, T, K, H), N a multiple of K.
        Return (B, T, N, H).
        """
        q_BNTH = q_BTNH.transpose(1, 2)
        k_BKTH = k_BTKH.transpose(1, 2)
        v_BKTH = v_BTKH.transpose(1, 2)
        is_grouped = q_BNTH.size(1) != k_BKTH.size(1)
        mask_B1TT = None
        if documents_BT is not None:
            is_same_BTT = documents_BT[:, :, None] == documents_BT[:, None]
            mask_B1TT = is_same_BTT[:, None]
        out_BNTH = F.scaled_dot_product_attention(
            q_BNTH, k_BKTH, v_BKTH, attn_mask=mask_B1TT, enable_gqa=is_grouped
        )
        return out_BNTH.transpose(1, 2)


class EncoderBlock(nn.Module):
    """One layer: attention and feed-forward, each with a norm, dropout and a residual connection."""

    def __init__(self, c: Config, is_first: bool = False) -> None:
        super().__init__()
        # Dropout of the embedding. It is part of the first layer, because the model must be the chain
        # embed -> layers -> norm -> head that a pipeline can cut
        input_dropout = c.dropout if is_first else 0.0
        self.input_dropout = nn.Dropout(input_dropout)
        self.attn_norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        self.attn = Attention(c.dim, c.num_heads, c.num_kv_heads, c.head_dim)
        self.attn.core = FullAttentionCore()
        self.ffn_norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        self.ffn = FeedForward(c.dim, c.ffn_dim)
        self.dropout = nn.Dropout(c.dropout)

    def forward(
        self, x_BTD: Tensor, angles: tuple[Tensor, Tensor], documents_BT: Tensor | None = None
    ) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        x_BTD = self.input_dropout(x_BTD)
        x_BTD = x_BTD + self.dropout(self.attn(self.attn_norm(x_BTD), angles, documents_BT))
        return x_BTD + self.dropout(self.ffn(self.ffn_norm(x_BTD)))


class Model(Decoder):
    """An encoder with the same chain of modules as a Decoder: embedding, layers, norm, head."""

    def __init__(self, c: Config) -> None:
        layers = (EncoderBlock(c, is_first=i == 0) for i in range(c.num_layers))
        norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        super().__init__(
            c.vocab_size, c.dim, RotaryAngles(c.head_dim, c.rope_theta), layers, norm, tied=False
        )


def initial(c: Config) -> dict[str, Draw]:
    """Return the initial distribution per parameter pattern; the first match wins."""
    return {
        "*norm.weight": Draw("ones"),
        "layers.*.*_norm.weight": Draw("ones"),
        # Small, so training outweighs the initial value even for rare tokens
        "embed.weight": Draw("normal", std=0.02),
        "head.weight": Draw("truncated_normal", std=c.dim**-0.5, cutoff=3.0),
        "layers.*.attn.w[qkv].weight": Draw("normal", std=c.dim**-0.5),
        "layers.*.attn.wo.weight": Draw("normal", std=c.dim**-0.5, depth="total"),
        "layers.*.ffn.w1.weight": Draw("normal", std=c.dim**-0.5),
        "layers.*.ffn.w[23].weight": Draw("normal", std=c.dim**-0.5, depth="total"),
    }
