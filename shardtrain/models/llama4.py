"""The text model of Llama 4 (Meta 2025): a routed and a shared expert per token, and attention in chunks.

Three of four layers have rotary positions and attend within chunks of 8,192 tokens. Every fourth
layer has no positions, attends to all earlier tokens, and sharpens its softmax for late tokens. The
image encoder is not supported.
Shape suffixes: B batch, T tokens, D model, N heads, K key-value heads, H head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.hub_formats.llama4_format import HUB
from shardtrain.layout import Depth, Draw, Layout
from shardtrain.models.layers import (
    AttentionCore,
    Decoder,
    FeedForward,
    RotaryAngles,
    build_norm,
    rotate_pairs,
    scaled_equally,
)
from shardtrain.models.moe import EXPERT_BIAS, EXPERT_STYLES, MoE, expert_draws, routing_of

__all__ = ["FLAVORS", "HUB", "LAYOUT", "Config", "Model", "initial"]


@dataclass(frozen=True)
class Config:
    """The shape of a Llama 4. ``model.overrides`` can set each field.

    The last of every ``interleave_moe_layer_step`` layers has experts, the others a feed-forward of
    ``ffn_dim``. The last of every ``no_rope_layer_interval`` layers has no rotary positions; with 0
    all layers have them.

    Layers with positions attend within chunks of ``attention_chunk_size`` tokens (0: no chunks).
    ``use_qk_norm`` scales their queries and keys to unit mean square. In layers without positions,
    ``attn_temperature_tuning`` multiplies the queries by 1 + attn_scale ln(1 + floor((position + 1)
    / floor_scale)) (Nakanishi 2025).
    """

    # Sizes.
    vocab_size: int = 202048
    dim: int = 5120
    num_layers: int = 48
    num_heads: int = 40
    num_kv_heads: int = 8
    head_dim: int = 128
    ffn_dim: int = 16384
    # Experts.
    moe_ffn_dim: int = 8192
    num_experts: int = 16
    num_shared_experts: int = 1
    top_k: int = 1
    interleave_moe_layer_step: int = 1
    score_func: str = "sigmoid"
    route_norm: bool = False
    score_before_experts: bool = True
    load_balance_coeff: float = 0.0
    balance_loss_coeff: float = 1e-3
    z_loss_coeff: float = 0.0
    # Norms and positions.
    norm_type: str = "rmsnorm"
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: str = "none"
    rope_scaling_factor: float = 8.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_seq_len: int = 8192
    # Layers without positions, chunks and the softmax temperature.
    no_rope_layer_interval: int = 4
    attention_chunk_size: int = 8192
    use_qk_norm: bool = False
    attn_temperature_tuning: bool = True
    floor_scale: int = 8192
    attn_scale: float = 0.1
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
        "layers.*.ffn": "gather",
        "layers.*.ffn.w[13]": "colwise",
        "layers.*.ffn.w2": "rowwise",
        **EXPERT_STYLES,
        "layers.*.moe.shared": "gather",
        "layers.*.moe.shared.w[13]": "colwise",
        "layers.*.moe.shared.w2": "rowwise",
        "norm": "sequence",
        "head": "head",
    },
    context="layers.*.attn.core",
    expert="layers.*.moe",
    buffers=EXPERT_BIAS,
    # With experts in every layer there is no ``ffn``, and with experts in no layer there is no ``moe``.
    optional=("layers.*.ffn", "layers.*.moe"),
)


class Angles(nn.Module):
    """Rotary angles, and the softmax temperature of the layers without rotary positions."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.rotary = RotaryAngles(
            c.head_dim,
            c.rope_theta,
            c.rope_scaling,
            c.rope_scaling_factor,
            c.rope_low_freq_factor,
            c.rope_high_freq_factor,
            c.rope_original_seq_len,
        )
        self.floor_scale = c.floor_scale
        self.attn_scale = c.attn_scale if c.attn_temperature_tuning else 0.0

    def forward(self, positions_BT: Tensor) -> tuple[Tensor, ...]:
        """Return cosines and sines (B, T, 1, H/2) and the temperature (B, T, 1, 1), float32, for
        positions (B, T).
        """
        # The temperature grows with the number of complete blocks of floor_scale tokens.
        steps_BT = ((positions_BT.float() + 1.0) / self.floor_scale).floor()
        steps_BT11 = steps_BT[..., None, None]
        temperature_BT11 = steps_BT11.log1p() * self.attn_scale + 1.0
        return *self.rotary(positions_BT), temperature_BT11


class Llama4Attention(nn.Module):
    """Grouped-query attention, either within chunks and with rotary positions, or without both."""

    def __init__(self, c: Config, has_rope: bool) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.has_rope = has_rope
        # Layers without positions do not normalize queries and keys.
        self.norm_eps = c.norm_eps if c.use_qk_norm and has_rope else None
        self.wq = nn.Linear(c.dim, c.num_heads * c.head_dim, bias=False)
        self.wk = nn.Linear(c.dim, c.num_kv_heads * c.head_dim, bias=False)
        self.wv = nn.Linear(c.dim, c.num_kv_heads * c.head_dim, bias=False)
        chunk = c.attention_chunk_size if has_rope else 0
        self.core = AttentionCore(chunk=chunk)
        self.wo = nn.Linear(c.num_heads * c.head_dim, c.dim, bias=False)

    def forward(
        self, x_BTD: Tensor, angles: tuple[Tensor, ...], documents_BT: Tensor | None = None
    ) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        cos_BT1h, sin_BT1h, temperature_BT11 = angles
        q_BTNH = self.wq(x_BTD).unflatten(-1, (-1, self.head_dim))
        k_BTKH = self.wk(x_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTKH = self.wv(x_BTD).unflatten(-1, (-1, self.head_dim))
        # Positions, or a temperature that replaces them.
        if self.has_rope:
            q_BTNH = rotate_pairs(q_BTNH, (cos_BT1h, sin_BT1h))
            k_BTKH = rotate_pairs(k_BTKH, (cos_BT1h, sin_BT1h))
        else:
            q_BTNH = (q_BTNH * temperature_BT11).type_as(q_BTNH)
        # The norm has no weights and may follow the rotation, which does not change the mean square
        if self.norm_eps is not None:
            q_BTNH = _unit_mean_square(q_BTNH, self.norm_eps)
            k_BTKH = _unit_mean_square(k_BTKH, self.norm_eps)
        out_BTNH = self.core(q_BTNH, k_BTKH, v_BTKH, documents_BT)
        return self.wo(out_BTNH.flatten(2))

    def qk_clip_powers(self) -> dict[str, list[float]]:
        """Return the powers of the clipping factor, or nothing if queries and keys are normalized."""
        return scaled_equally(self.head_dim) if self.norm_eps is None else {}


def _unit_mean_square(x_BTNH: Tensor, eps: float) -> Tensor:
    """Scale each head (H,) to a mean square of 1, in float32 or above."""
    precise_BTNH = x_BTNH.to(torch.promote_types(x_BTNH.dtype, torch.float32))
    return F.rms_norm(precise_BTNH, x_BTNH.shape[-1:], eps=eps).type_as(x_BTNH)


class Llama4Block(nn.Module):
    """One layer: attention and a feed-forward or experts, each with a norm and a residual connection."""

    def __init__(self, c: Config, index: int) -> None:
        super().__init__()
        self.attn_norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        # The interval counts layers from 1. Every layer whose number it divides has no rotary positions.
        has_rope = not c.no_rope_layer_interval or (index + 1) % c.no_rope_layer_interval != 0
        self.attn = Llama4Attention(c, has_rope)
        self.ffn_norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        is_dense = (index + 1) % c.interleave_moe_layer_step != 0
        if is_dense:
            self.ffn: nn.Module = FeedForward(c.dim, c.ffn_dim)
            self.moe: nn.Module = nn.Identity()
        else:
            self.ffn = nn.Identity()
            shared_dim = c.num_shared_experts * c.moe_ffn_dim
            self.moe = MoE(c.dim, c.moe_ffn_dim, routing_of(c), shared_dim)

    def forward(
        self, x_BTD: Tensor, angles: tuple[Tensor, ...], documents_BT: Tensor | None = None
    ) -> Tensor:
        """Map (B, T, D) to (B, T, D). Either ``ffn`` or ``moe`` is the identity."""
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), angles, documents_BT)
        hidden_BTD = self.ffn(self.ffn_norm(x_BTD))
        if not isinstance(self.moe, nn.Identity):
            hidden_BTD = self.moe(hidden_BTD, documents_BT)
        return x_BTD + hidden_BTD


class Model(Decoder):
    """A Llama 4 without its image encoder."""

    def __init__(self, c: Config) -> None:
        layers = [Llama4Block(c, index) for index in range(c.num_layers)]
        norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        super().__init__(c.vocab_size, c.dim, Angles(c), layers, norm, c.tied_embeddings)


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
        "layers.*.ffn.w1.weight": Draw("normal", std=0.02),
        "layers.*.ffn.w[23].weight": Draw("normal", std=0.02, depth=depth),
        "layers.*.moe.shared.w1.weight": Draw("normal", std=0.02),
        "layers.*.moe.shared.w[23].weight": Draw("normal", std=0.02, depth=depth),
        **expert_draws(0.02, depth),
    }


FLAVORS = {
    # A small model for tests.
    "debugmodel": {
        "vocab_size": 2048,
        "dim": 256,
        "num_layers": 6,
        "num_heads": 16,
        "num_kv_heads": 16,
        "head_dim": 16,
        "ffn_dim": 768,
        "moe_ffn_dim": 512,
        "num_experts": 8,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 256,
        "use_qk_norm": True,
    },
    "17bx16e": {
        "rope_scaling": "llama3",
        "rope_scaling_factor": 16.0,
        "rope_high_freq_factor": 1.0,
        "use_qk_norm": True,
    },
    "17bx128e": {"num_experts": 128, "interleave_moe_layer_step": 2},
}
