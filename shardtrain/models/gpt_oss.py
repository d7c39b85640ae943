"""gpt-oss (OpenAI 2025): experts with biases and a clamped gate, and attention with sinks.

Every other layer has a sliding window. A sink is a learned score per head that is added to the
softmax denominator, so the weights of a head may sum to less than 1.
Shape suffixes: B batch, T tokens, D model, N heads, K key-value heads, H head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardtrain.hub_formats.gpt_oss_format import HUB
from shardtrain.layout import Draw, Layout
from shardtrain.models.layers import (
    Decoder,
    HeadNumbers,
    SinkAttentionCore,
    build_norm,
    rotate,
    scaled_equally,
)
from shardtrain.models.moe import EXPERT_BIAS, EXPERT_STYLES, MoE, expert_draws, routing_of
from shardtrain.models.yarn import YarnAngles, yarn_scale

__all__ = ["FLAVORS", "HUB", "LAYOUT", "Config", "Model", "initial"]


@dataclass(frozen=True)
class Config:
    """The shape of a gpt-oss. ``model.overrides`` can set each field.

    Layers 0, 2, 4, ... attend within ``sliding_window`` tokens, including the token itself; 0 means
    no window. An expert computes w2((up + 1) gate sigmoid(swiglu_alpha gate)), where
    ``swiglu_limit`` bounds gate from above and up on both sides. ``rope_factor`` 1 leaves the
    rotary angles unscaled.
    """

    # Sizes.
    vocab_size: int = 201088
    dim: int = 2880
    num_layers: int = 36
    num_heads: int = 64
    num_kv_heads: int = 8
    head_dim: int = 64
    # Experts.
    moe_ffn_dim: int = 2880
    num_experts: int = 128
    top_k: int = 4
    score_func: str = "softmax"
    route_norm: bool = True
    router_bias: bool = True
    load_balance_coeff: float = 0.0
    balance_loss_coeff: float = 1e-3
    z_loss_coeff: float = 0.0
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    # Attention window and norms.
    sliding_window: int = 128
    norm_type: str = "rmsnorm"
    norm_eps: float = 1e-5
    # Positions: YaRN.
    rope_theta: float = 150000.0
    rope_factor: float = 32.0
    rope_original_seq_len: int = 4096
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_truncate: bool = False
    # Initialization and tied weights.
    tied_embeddings: bool = False
    init_std: float = 0.02


LAYOUT = Layout(
    first=("embed",),
    layers="layers",
    last=("norm", "head"),
    tensor={
        "embed": "embed",
        "layers.*.attn_norm": "sequence",
        "layers.*.attn": "gather",
        "layers.*.attn.w[qkv]": "colwise",
        "layers.*.attn.sinks": "per_head",
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


class ScaledYarnAngles(YarnAngles):
    """Rotary angles stretched by YaRN, including its scale of queries and keys."""

    def forward(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines times YaRN's scale, float32, each (B, T, 1, H/2), for positions (B, T)."""
        cos_BT1h, sin_BT1h = super().forward(positions_BT)
        # YaRN's scale multiplies both queries and keys, so scores are scaled by its square.
        scale = yarn_scale(self.factor, 1.0)
        return cos_BT1h * scale, sin_BT1h * scale


class GptOssAttention(nn.Module):
    """Grouped-query attention with biases, rotary positions and a sink per head."""

    def __init__(self, c: Config, window: int) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.wq = nn.Linear(c.dim, c.num_heads * c.head_dim)
        self.wk = nn.Linear(c.dim, c.num_kv_heads * c.head_dim)
        self.wv = nn.Linear(c.dim, c.num_kv_heads * c.head_dim)
        self.sinks = HeadNumbers(c.num_heads)
        self.core = SinkAttentionCore(window)
        self.wo = nn.Linear(c.num_heads * c.head_dim, c.dim)

    def forward(
        self, x_BTD: Tensor, angles: tuple[Tensor, Tensor], documents_BT: Tensor | None = None
    ) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        # Split the features into heads. K heads of keys and values serve N heads of queries.
        q_BTNH = self.wq(x_BTD).unflatten(-1, (-1, self.head_dim))
        k_BTKH = self.wk(x_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTKH = self.wv(x_BTD).unflatten(-1, (-1, self.head_dim))
        q_BTNH = rotate(q_BTNH, angles)
        k_BTKH = rotate(k_BTKH, angles)
        out_BTNH = self.core(q_BTNH, k_BTKH, v_BTKH, documents_BT, self.sinks())
        return self.wo(out_BTNH.flatten(2))

    def qk_clip_powers(self) -> dict[str, list[float]]:
        """Return the powers of the clipping factor, see ``distributed/qk_clip.py``."""
        return scaled_equally(self.head_dim)


class GptOssBlock(nn.Module):
    """One layer: attention and experts, each with a norm and a residual connection."""

    def __init__(self, c: Config, index: int) -> None:
        super().__init__()
        self.attn_norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        # Layers alternate, starting with a window.
        window = 0 if index % 2 else c.sliding_window
        self.attn = GptOssAttention(c, window)
        self.ffn_norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        gate = ClampedGate(c.swiglu_alpha, c.swiglu_limit)
        self.moe = MoE(c.dim, c.moe_ffn_dim, routing_of(c), expert_bias=True, gate=gate)

    def forward(
        self, x_BTD: Tensor, angles: tuple[Tensor, Tensor], documents_BT: Tensor | None = None
    ) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), angles, documents_BT)
        return x_BTD + self.moe(self.ffn_norm(x_BTD), documents_BT)


@dataclass(frozen=True)
class ClampedGate:
    """Gating function of the experts (gpt-oss model card, section 2.1). R rows, F feed-forward features."""

    alpha: float
    limit: float

    def __call__(self, gate_RF: Tensor, up_RF: Tensor) -> Tensor:
        """Return (up + 1) gate sigmoid(alpha gate) of the bounded inputs, all (R, F)."""
        # The bounds keep products of large activations in range.
        gate_RF = gate_RF.clamp(max=self.limit)
        up_RF = up_RF.clamp(-self.limit, self.limit)
        return (up_RF + 1.0) * (gate_RF * torch.sigmoid(gate_RF * self.alpha))


class Model(Decoder):
    """The gpt-oss model."""

    def __init__(self, c: Config) -> None:
        rope = ScaledYarnAngles(
            c.head_dim,
            c.rope_theta,
            c.rope_factor,
            c.rope_original_seq_len,
            c.rope_beta_fast,
            c.rope_beta_slow,
            c.rope_truncate,
        )
        layers = [GptOssBlock(c, index) for index in range(c.num_layers)]
        norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        super().__init__(c.vocab_size, c.dim, rope, layers, norm, c.tied_embeddings)


def initial(c: Config) -> dict[str, Draw]:
    """Return the initial distribution per parameter pattern; the first match wins.

    All parameters but norms and biases have the same standard deviation.
    """
    normal = Draw("normal", std=c.init_std)
    return {
        "*norm.weight": Draw("ones"),
        "layers.*.*_norm.weight": Draw("ones"),
        "embed.weight": normal,
        "head.weight": normal,
        "layers.*.attn.sinks.weight": normal,
        "layers.*.attn.w?.weight": normal,
        "layers.*.attn.w?.bias": Draw("zeros"),
        "layers.*.moe.router.gate.bias": Draw("zeros"),
        "layers.*.moe.experts.w?_bias": Draw("zeros"),
        **expert_draws(c.init_std, "none"),
    }


FLAVORS = {
    # A small model for tests.
    "debugmodel": {
        "vocab_size": 2048,
        "dim": 256,
        "num_layers": 4,
        "num_heads": 16,
        "num_kv_heads": 4,
        "head_dim": 16,
        "moe_ffn_dim": 256,
        "num_experts": 8,
    },
    "20b": {"num_layers": 24, "num_experts": 32},
    "120b": {},
}
