"""DeepSeek-V3 and V2 (DeepSeek-AI 2024): multi-head latent attention, and many small experts plus
shared experts.

Multi-head latent attention (V2, section 2.1) computes the keys and values of all heads from one
small vector per token, the latent. The rotary part of a key is shared by all heads.
Shape suffixes: B batch, T tokens, D model, N heads, H features of a query or key, Q latent of
queries, C latent of keys and values, R rotary part, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.hub_formats.deepseek_v3_format import HUB
from shardtrain.layout import Draw, Layout
from shardtrain.models.layers import (
    AttentionCore,
    FeedForward,
    build_norm,
    rotate_pairs,
)
from shardtrain.models.moe import EXPERT_BIAS, EXPERT_STYLES, MoE, expert_draws, routing_of
from shardtrain.models.multi_token import (
    JoinNextToken,
    MultiTokenDecoder,
    with_mtp_draws,
    with_mtp_layers,
)
from shardtrain.models.yarn import YarnAngles, yarn_scale

__all__ = ["FLAVORS", "HUB", "LAYOUT", "Config", "Model", "initial"]


@dataclass(frozen=True)
class Config:
    """The shape of a DeepSeek-V3; each field can be set by ``model.overrides``.

    ``q_lora_rank`` 0 computes queries without a latent. The first ``num_dense_layers`` layers have
    a feed-forward of ``ffn_dim`` instead of experts. ``num_shared_experts`` may be 0.
    ``rope_factor`` 1 leaves the rotary angles unscaled. ``num_nextn_predict_layers`` is the number
    of depths of multi-token prediction.
    """

    vocab_size: int = 129280
    dim: int = 7168
    num_layers: int = 61
    num_dense_layers: int = 3
    num_heads: int = 128
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    ffn_dim: int = 18432
    moe_ffn_dim: int = 2048
    num_experts: int = 256
    num_shared_experts: int = 1
    top_k: int = 8
    score_func: str = "sigmoid"
    route_norm: bool = True
    route_scale: float = 2.5
    num_groups: int = 8
    top_groups: int = 4
    group_top_k: int = 2
    load_balance_coeff: float = 1e-3
    balance_loss_coeff: float = 1e-4
    z_loss_coeff: float = 0.0
    norm_type: str = "rmsnorm"
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_factor: float = 40.0
    rope_original_seq_len: int = 4096
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    mscale: float = 1.0
    tied_embeddings: bool = False
    num_nextn_predict_layers: int = 0
    init_std: float = 0.006

    @property
    def head_dim(self) -> int:
        """Mean width of a key and a value, which determines the FLOPs of attention per head and
        pair of tokens.
        """
        return (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim) // 2


_BLOCKS = Layout(
    first=("embed",),
    layers="layers",
    last=("norm", "head"),
    tensor={
        "embed": "embed",
        "layers.*.attn_norm": "sequence",
        "layers.*.attn": "gather",
        "layers.*.attn.wq_a": "replicate",
        "layers.*.attn.q_norm": "replicate",
        "layers.*.attn.wq_b": "colwise",
        "layers.*.attn.wkv_a": "replicate",
        "layers.*.attn.kv_norm": "replicate",
        "layers.*.attn.wkv_b": "colwise",
        "layers.*.attn.shared_key": "copy",
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
    # Without dense layers there is no ``ffn``, and with only dense layers there is no ``moe``.
    optional=("layers.*.ffn", "layers.*.moe"),
)
LAYOUT = with_mtp_layers(_BLOCKS)


_LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of the two latents. The published code and transformers ignore ``norm_eps`` here."""


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, section 2.1.2)."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.nope_dim = c.qk_nope_head_dim
        self.rope_dim = c.qk_rope_head_dim
        self.v_dim = c.v_head_dim
        qk_dim = self.nope_dim + self.rope_dim
        if c.q_lora_rank > 0:
            self.wq_a: nn.Module = nn.Linear(c.dim, c.q_lora_rank, bias=False)
            self.q_norm: nn.Module = build_norm("rmsnorm", c.q_lora_rank, _LATENT_NORM_EPS)
            self.wq_b = nn.Linear(c.q_lora_rank, c.num_heads * qk_dim, bias=False)
        else:
            self.wq_a = nn.Identity()
            self.q_norm = nn.Identity()
            self.wq_b = nn.Linear(c.dim, c.num_heads * qk_dim, bias=False)
        self.wkv_a = nn.Linear(c.dim, c.kv_lora_rank + self.rope_dim, bias=False)
        self.kv_norm = build_norm("rmsnorm", c.kv_lora_rank, _LATENT_NORM_EPS)
        # Returns the rotary key that all heads share. LAYOUT names its style of tensor parallelism.
        self.shared_key = nn.Identity()
        kv_dim = self.nope_dim + self.v_dim
        self.wkv_b = nn.Linear(c.kv_lora_rank, c.num_heads * kv_dim, bias=False)
        self.core = AttentionCore()
        self.wo = nn.Linear(c.num_heads * self.v_dim, c.dim, bias=False)
        # The core only divides by sqrt(H). YaRN's scale of queries and keys is applied to the
        # queries, squared
        self.q_scale = yarn_scale(c.rope_factor, c.mscale) ** 2

    def forward(
        self, x_BTD: Tensor, angles: tuple[Tensor, Tensor], documents_BT: Tensor | None = None
    ) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        # Queries from their latent. The last R features of each head are rotated
        q_latent_BTQ = self.q_norm(self.wq_a(x_BTD))
        qk_dim = self.nope_dim + self.rope_dim
        q_BTNH = self.wq_b(q_latent_BTQ).unflatten(-1, (-1, qk_dim))
        q_nope_BTNH, q_rope_BTNR = q_BTNH.split((self.nope_dim, self.rope_dim), dim=-1)

        # Keys and values from one latent. wkv_a also returns the rotary part of the keys, one for all heads
        c_BTC, k_rope_BTR = self.wkv_a(x_BTD).tensor_split((-self.rope_dim,), dim=-1)
        kv_BTX = self.wkv_b(self.kv_norm(c_BTC))
        kv_BTNH = kv_BTX.unflatten(-1, (-1, self.nope_dim + self.v_dim))
        k_nope_BTNH, v_BTNH = kv_BTNH.split((self.nope_dim, self.v_dim), dim=-1)

        # Rotate the rotary parts, and append them to the others
        q_rope_BTNR = rotate_pairs(q_rope_BTNR, angles)
        q_BTNH = torch.cat((q_nope_BTNH, q_rope_BTNR), dim=-1) * self.q_scale
        k_rope_BT1R = rotate_pairs(self.shared_key(k_rope_BTR).unsqueeze(2), angles)
        k_rope_BTNR = k_rope_BT1R.expand(-1, -1, k_nope_BTNH.size(2), -1)
        k_BTNH = torch.cat((k_nope_BTNH, k_rope_BTNR), dim=-1)

        # Attention kernels require values as wide as keys: pad them with zeros, and drop the
        # padding of the output
        padding = k_BTNH.size(-1) - self.v_dim
        v_BTNH = F.pad(v_BTNH, (0, padding))
        out_BTNH = self.core(q_BTNH, k_BTNH, v_BTNH, documents_BT)
        out_BTNH = out_BTNH[..., : self.v_dim]
        return self.wo(out_BTNH.flatten(2))

    def qk_clip_powers(self) -> dict[str, list[float]]:
        """Return the powers of the clipping factor, see ``distributed/qk_clip.py``.

        All heads share the rotary part of a key, so only the rotary part of a head's queries is scaled.
        """
        return {
            "wq_b": [0.5] * self.nope_dim + [1.0] * self.rope_dim,
            "wkv_b": [0.5] * self.nope_dim + [0.0] * self.v_dim,
        }


class DeepseekV3Block(nn.Module):
    """One layer: attention and a feed-forward or experts, each with a norm and a residual connection."""

    def __init__(self, c: Config, is_dense: bool) -> None:
        super().__init__()
        self.attn_norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        self.attn = LatentAttention(c)
        self.ffn_norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        if is_dense:
            self.ffn: nn.Module = FeedForward(c.dim, c.ffn_dim)
            self.moe: nn.Module = nn.Identity()
        else:
            self.ffn = nn.Identity()
            # Every token uses all shared experts, so they are one wide feed-forward
            shared_dim = c.num_shared_experts * c.moe_ffn_dim
            self.moe = MoE(c.dim, c.moe_ffn_dim, routing_of(c), shared_dim)

    def forward(
        self, x_BTD: Tensor, angles: tuple[Tensor, Tensor], documents_BT: Tensor | None = None
    ) -> Tensor:
        """Map (B, T, D) to (B, T, D). Either ``ffn`` or ``moe`` is the identity."""
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), angles, documents_BT)
        hidden_BTD = self.ffn(self.ffn_norm(x_BTD))
        if not isinstance(self.moe, nn.Identity):
            hidden_BTD = self.moe(hidden_BTD, documents_BT)
        return x_BTD + hidden_BTD


class MultiTokenBlock(DeepseekV3Block):
    """One depth of multi-token prediction: a block with two inputs and a last norm."""

    def __init__(self, c: Config, is_dense: bool) -> None:
        super().__init__(c, is_dense)
        self.join = JoinNextToken(c.dim, c.norm_type, c.norm_eps)
        self.shared_norm = build_norm(c.norm_type, c.dim, c.norm_eps)

    def forward(  # type: ignore[override]
        self,
        x_BTD: Tensor,
        embedded_BTD: Tensor,
        angles: tuple[Tensor, Tensor],
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """Map the output of the previous depth and embeddings, both (B, T, D), to (B, T, D)."""
        x_BTD = super().forward(self.join(x_BTD, embedded_BTD), angles, documents_BT)
        return self.shared_norm(x_BTD)


class Model(MultiTokenDecoder):
    """A DeepSeek-V3, with multi-token prediction if ``num_nextn_predict_layers`` is not 0."""

    def __init__(self, c: Config) -> None:
        rope = YarnAngles(
            c.qk_rope_head_dim,
            c.rope_theta,
            c.rope_factor,
            c.rope_original_seq_len,
            c.rope_beta_fast,
            c.rope_beta_slow,
        )
        layers: list[nn.Module] = []
        for i in range(c.num_layers):
            layers.append(DeepseekV3Block(c, is_dense=i < c.num_dense_layers))
        mtp_layers = []
        for i in range(c.num_layers, c.num_layers + c.num_nextn_predict_layers):
            mtp_layers.append(MultiTokenBlock(c, is_dense=i < c.num_dense_layers))
        norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        super().__init__(c.vocab_size, c.dim, rope, layers, norm, c.tied_embeddings, mtp_layers)


def initial(c: Config) -> dict[str, Draw]:
    """Return the initial distribution per parameter pattern; the first match wins.

    All matrices have the same standard deviation (V3, section 4.2).
    """
    normal = Draw("normal", std=c.init_std)
    draws = {
        "*norm.weight": Draw("ones"),
        "layers.*.*_norm.weight": Draw("ones"),
        "layers.*.attn.*_norm.weight": Draw("ones"),
        "embed.weight": normal,
        "head.weight": normal,
        "layers.*.attn.w*.weight": normal,
        "layers.*.ffn.w?.weight": normal,
        "layers.*.moe.shared.w?.weight": normal,
        **expert_draws(c.init_std, "none"),
    }
    return with_mtp_draws(draws, c.init_std)


FLAVORS = {
    "debugmodel": {
        "vocab_size": 2048,
        "dim": 256,
        "num_layers": 6,
        "num_dense_layers": 1,
        "num_heads": 16,
        "q_lora_rank": 0,
        "kv_lora_rank": 512,
        "ffn_dim": 1024,
        "moe_ffn_dim": 256,
        "num_experts": 8,
        "num_shared_experts": 2,
        "top_k": 3,
        "score_func": "softmax",
        "route_norm": False,
        "route_scale": 1.0,
        "num_groups": 1,
        "top_groups": 1,
        "mscale": 0.70,
        "init_std": 0.02,
    },
    "16B": {
        "vocab_size": 102400,
        "dim": 2048,
        "num_layers": 27,
        "num_dense_layers": 1,
        "num_heads": 16,
        "q_lora_rank": 0,
        "ffn_dim": 10944,
        "moe_ffn_dim": 1408,
        "num_experts": 64,
        "num_shared_experts": 2,
        "top_k": 6,
        "score_func": "softmax",
        "route_norm": False,
        "route_scale": 1.0,
        "num_groups": 1,
        "top_groups": 1,
        "mscale": 0.707,
    },
    "236B": {
        "vocab_size": 102400,
        "dim": 5120,
        "num_layers": 60,
        "num_dense_layers": 1,
        "ffn_dim": 12288,
        "moe_ffn_dim": 1536,
        "num_experts": 160,
        "num_shared_experts": 2,
        "top_k": 6,
        "score_func": "softmax",
        "route_norm": False,
        "route_scale": 16.0,
        "top_groups": 3,
        "group_top_k": 1,
    },
    "671B": {},
}
