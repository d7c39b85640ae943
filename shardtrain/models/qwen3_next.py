"""Qwen3-Next (Qwen team 2025): three layers with a gated delta net for each layer with gated attention,
and experts.

A gated delta net (Yang et al. 2024) has a state of fixed size per head instead of keys and values of all
tokens. A short convolution precedes it. Norms are zero-centered: they multiply by one plus their weight. A
shared expert with a separate gate supplements the experts.

Shape suffixes: B batch, T tokens, D model, N heads (value heads of a gated delta net), K key heads, H head
or features of a key, V features of a value, G = N / K, C channels of the convolution,
X features per key head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.hub_formats.qwen3_next_format import HUB
from shardtrain.layout import Draw, Layout
from shardtrain.models.layers import AttentionCore, Decoder, HeadNumbers, RotaryAngles, rotate
from shardtrain.models.moe import EXPERT_BIAS, EXPERT_STYLES, MoE, expert_draws, routing_of
from shardtrain.ops import gated_delta_net
from shardtrain.utils.errors import ConfigError, Problem

__all__ = ["FLAVORS", "HUB", "LAYOUT", "Config", "Model", "initial"]


@dataclass(frozen=True)
class Config:
    """The shape of a Qwen3-Next; each field can be set by ``model.overrides``.

    Every ``full_attention_interval``-th layer has attention, the others a gated delta net. ``linear_*`` are
    the sizes of the gated delta net.
    ``rotary_pct`` is the fraction of the features of a head that are rotated.
    """

    # Sizes.
    vocab_size: int = 151936
    dim: int = 2048
    num_layers: int = 48
    full_attention_interval: int = 4
    # Attention.
    num_heads: int = 16
    num_kv_heads: int = 2
    head_dim: int = 256
    rotary_pct: float = 0.25
    # Gated delta net.
    linear_key_heads: int = 16
    linear_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_width: int = 4
    # Experts.
    moe_ffn_dim: int = 512
    shared_ffn_dim: int = 512
    num_experts: int = 512
    top_k: int = 10
    score_func: str = "softmax"
    route_norm: bool = True
    load_balance_coeff: float = 0.0
    balance_loss_coeff: float = 1e-3
    z_loss_coeff: float = 0.0
    # Norms and positions.
    norm_eps: float = 1e-6
    rope_theta: float = 10000000.0
    tied_embeddings: bool = False
    init_std: float = 0.02

    @property
    def rotary_dim(self) -> int:
        """Number of features of a head that are rotated. The others are unchanged."""
        return int(self.head_dim * self.rotary_pct)


LAYOUT = Layout(
    first=("embed",),
    layers="layers",
    last=("norm", "head"),
    tensor={
        "embed": "embed",
        "layers.*.attn_norm": "sequence",
        "layers.*.attn": "gather",
        "layers.*.attn.w[qkv]": "colwise",
        "layers.*.attn.[qk]_norm": "heads",
        "layers.*.attn.wo": "rowwise",
        # the rows of these linears and the channels of the filters are ordered by key head
        "layers.*.delta": "gather",
        "layers.*.delta.w[qb]*": "colwise",
        "layers.*.delta.filters": "per_head",
        "layers.*.delta.a_log": "per_head",
        "layers.*.delta.dt_bias": "per_head",
        "layers.*.delta.norm": "heads",
        "layers.*.delta.wo": "rowwise",
        "layers.*.ffn_norm": "sequence",
        **EXPERT_STYLES,
        "layers.*.moe.shared": "gather",
        "layers.*.moe.shared.w[13]": "colwise",
        "layers.*.moe.shared.w2": "rowwise",
        "layers.*.moe.shared_gate": "router",
        "norm": "sequence",
        "head": "head",
    },
    context="layers.*.attn.core",
    recurrence="layers.*.delta.core",
    expert="layers.*.moe",
    buffers=EXPERT_BIAS,
    # Few layers may all have a gated delta net, and an interval of 1 leaves none.
    optional=("layers.*.attn", "layers.*.delta"),
)


class ZeroCenteredNorm(nn.Module):
    """RMSNorm that multiplies by 1 + weight, because weight decay then pulls the factor to 1. Computes in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        scale = 1.0 + self.weight.to(dtype)
        out = F.rms_norm(x.to(dtype), scale.shape, scale, self.eps)
        return out.type_as(x)


class GatedNorm(nn.Module):
    """RMSNorm of each head, multiplied by the SiLU of a gate."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x_BTNV: Tensor, gate_BTNV: Tensor) -> Tensor:
        """Normalize the last dimension and apply the gate, in the dtype of ``x_BTNV``. Return the gate's dtype."""
        # The gate is applied in the dtype of the recurrence, which is float32.
        normed_BTNV = F.rms_norm(x_BTNV, self.weight.shape, self.weight.to(x_BTNV.dtype), self.eps)
        return (normed_BTNV * F.silu(gate_BTNV.to(x_BTNV.dtype))).type_as(gate_BTNV)


class GatedAttention(nn.Module):
    """Grouped-query attention with norms of heads, partly rotated features, and a sigmoid gate on its output."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.rotary_dim = c.rotary_dim
        # each head of wq has its query, and then the gate of its output
        self.wq = nn.Linear(c.dim, 2 * c.num_heads * c.head_dim, bias=False)
        self.wk = nn.Linear(c.dim, c.num_kv_heads * c.head_dim, bias=False)
        self.wv = nn.Linear(c.dim, c.num_kv_heads * c.head_dim, bias=False)
        self.q_norm = ZeroCenteredNorm(c.head_dim, c.norm_eps)
        self.k_norm = ZeroCenteredNorm(c.head_dim, c.norm_eps)
        self.core = AttentionCore()
        self.wo = nn.Linear(c.num_heads * c.head_dim, c.dim, bias=False)

    def forward(
        self, x_BTD: Tensor, angles: tuple[Tensor, Tensor], documents_BT: Tensor | None = None
    ) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        # Each head of wq has its query first, and then the gate of its output.
        q_gate_BTNX = self.wq(x_BTD).unflatten(-1, (-1, 2 * self.head_dim))
        q_BTNH, gate_BTNH = q_gate_BTNX.chunk(2, dim=-1)
        # Norms of queries and keys come before the rotation.
        k_BTKH = self.wk(x_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTKH = self.wv(x_BTD).unflatten(-1, (-1, self.head_dim))
        q_BTNH = self._rotate_part(self.q_norm(q_BTNH), angles)
        k_BTKH = self._rotate_part(self.k_norm(k_BTKH), angles)
        out_BTNH = self.core(q_BTNH, k_BTKH, v_BTKH, documents_BT)
        gated_BTNH = out_BTNH * gate_BTNH.sigmoid()
        return self.wo(gated_BTNH.flatten(2))

    def qk_clip_powers(self) -> dict[str, list[float]]:
        """Return nothing, because the scale of the weights does not change normalized queries and keys."""
        return {}

    def _rotate_part(self, x_BTNH: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        rotary, unchanged = x_BTNH.tensor_split((self.rotary_dim,), dim=-1)
        return torch.cat((rotate(rotary, angles), unchanged), dim=-1)


class GatedDeltaCore(nn.Module):
    """The recurrence of a layer, without weights: a short convolution and the gated delta rule.

    Attributes:
        key_dim: features H of a query and of a key.
        value_dim: features V of a value.
        flops_per_token: FLOPs per token of forward and backward in the unsharded model.
    """

    def __init__(self, key_dim: int, value_dim: int, num_heads: int = 0) -> None:
        super().__init__()
        self.key_dim = key_dim
        self.value_dim = value_dim
        self.flops_per_token = gated_delta_net.flops_per_token(num_heads, key_dim, value_dim)

    def forward(
        self,
        inputs: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """Return the outputs (B, T, N, V) for entire rows, whose state is zero at the start of each document.

        Args:
            inputs: queries, keys and values of each key head before the convolution, (B, T, C); the
                logarithm of the decay and the strength of each value head, (B, T, N).
            weights: the filters of the channels, (C, 1, width).
            documents_BT: the document of each token.
        """
        # Before a row there are no tokens, so the convolution starts with zeros.
        starts_BT = gated_delta_net.document_starts(documents_BT)
        before = gated_delta_net.last_tokens(inputs[0][:, :0], self.look_back(weights))
        return self.chunk(inputs, weights, before, starts_BT).run()[0]

    def look_back(self, weights: tuple[Tensor, ...]) -> int:
        """Return the number of tokens before a chunk whose first input the chunk needs."""
        return weights[0].size(-1) - 1

    def chunk(
        self,
        inputs: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
        before: Tensor,
        starts_BT: Tensor | None,
    ) -> gated_delta_net.DeltaChunk:
        """Return a chunk of consecutive tokens,
        which maps an incoming state to outputs and an outgoing state.

        Args:
            inputs: the inputs of ``forward`` for the tokens of the chunk.
            weights: the weights of ``forward``.
            before: the first input of the ``look_back`` tokens before the chunk. It is zero before a row,
                and for tokens that belong to another document than the chunk's first token.
            starts_BT: mask of the tokens that have another document than the previous token.
        """
        # Recurrences accumulate rounding errors, so they run in float32.
        mixed_BTC, decay_BTN, beta_BTN = inputs
        dtype = torch.promote_types(mixed_BTC.dtype, torch.float32)
        filters_Cw = weights[0].flatten(1).to(dtype)
        mixed_BTC = gated_delta_net.convolve(
            mixed_BTC.to(dtype), filters_Cw, before.to(dtype), starts_BT
        )
        num_values = decay_BTN.size(-1) * self.value_dim
        num_key_heads = (mixed_BTC.size(-1) - num_values) // (2 * self.key_dim)
        mixed_BTKX = F.silu(mixed_BTC).unflatten(-1, (num_key_heads, -1))
        # Each key head has its query, its key, and the values of its group.
        q_BTKH, k_BTKH, v_BTKX = mixed_BTKX.tensor_split((self.key_dim, 2 * self.key_dim), dim=-1)
        v_BTNV = v_BTKX.unflatten(-1, (-1, self.value_dim)).flatten(2, 3)
        return gated_delta_net.DeltaChunk(
            # Queries and keys of unit length keep the state bounded.
            gated_delta_net.unit_length(q_BTKH) * self.key_dim**-0.5,
            gated_delta_net.unit_length(k_BTKH),
            v_BTNV,
            decay_BTN.to(dtype),
            beta_BTN.to(dtype),
            starts_BT,
        )


class GatedDeltaNet(nn.Module):
    """Projections, gates and norm around a ``GatedDeltaCore``."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.value_dim = c.linear_value_head_dim
        self.groups = c.linear_value_heads // c.linear_key_heads
        num_values = c.linear_value_heads * c.linear_value_head_dim
        num_mixed = 2 * c.linear_key_heads * c.linear_key_head_dim + num_values
        # Each key head of wqkvz has its query, its key, its values, and the gates of their outputs. Each
        # key head of wba has the strengths and the decays of its values.
        self.wqkvz = nn.Linear(c.dim, num_mixed + num_values, bias=False)
        self.wba = nn.Linear(c.dim, 2 * c.linear_value_heads, bias=False)
        self.filters = HeadNumbers(num_mixed, 1, c.linear_conv_width)
        self.a_log = HeadNumbers(c.linear_value_heads)
        self.dt_bias = HeadNumbers(c.linear_value_heads)
        self.core = GatedDeltaCore(
            c.linear_key_head_dim, c.linear_value_head_dim, c.linear_value_heads
        )
        self.norm = GatedNorm(c.linear_value_head_dim, c.norm_eps)
        self.wo = nn.Linear(num_values, c.dim, bias=False)

    def forward(
        self, x_BTD: Tensor, _: tuple[Tensor, Tensor], documents_BT: Tensor | None = None
    ) -> Tensor:
        """Map (B, T, D) to (B, T, D). Positions have no effect."""
        # Decays and strengths of each value head.
        strength_BTN, step_BTN = self._by_value_head(self.wba(x_BTD))
        dtype = torch.promote_types(x_BTD.dtype, torch.float32)
        a_log_N = self.a_log().to(dtype)
        decay_BTN = -a_log_N.exp() * F.softplus(step_BTN.to(dtype) + self.dt_bias().to(dtype))

        # This rank may have only some of the key heads.
        num_key_heads = a_log_N.size(0) // self.groups
        mixed_BTKX = self.wqkvz(x_BTD).unflatten(-1, (num_key_heads, -1))
        num_values = self.groups * self.value_dim
        mixed_BTKX, gate_BTKX = mixed_BTKX.tensor_split((-num_values,), dim=-1)
        gate_BTNV = gate_BTKX.unflatten(-1, (-1, self.value_dim)).flatten(2, 3)

        # The gate of the output stays outside of the recurrence.
        inputs = (mixed_BTKX.flatten(2), decay_BTN, strength_BTN.sigmoid())
        out_BTNV = self.core(inputs, (self.filters(),), documents_BT)
        return self.wo(self.norm(out_BTNV, gate_BTNV).flatten(2))

    def _by_value_head(self, x_BTX: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x_BTX.unflatten(-1, (-1, 2 * self.groups)).chunk(2, dim=-1)
        return first.flatten(2), second.flatten(2)


class Qwen3NextBlock(nn.Module):
    """One layer: attention or a gated delta net, and experts, each with a norm and a residual connection."""

    def __init__(self, c: Config, has_attention: bool) -> None:
        super().__init__()
        self.attn_norm = ZeroCenteredNorm(c.dim, c.norm_eps)
        self.attn = GatedAttention(c) if has_attention else None
        self.delta = None if has_attention else GatedDeltaNet(c)
        self.ffn_norm = ZeroCenteredNorm(c.dim, c.norm_eps)
        self.moe = MoE(c.dim, c.moe_ffn_dim, routing_of(c), c.shared_ffn_dim, shared_gate=True)

    def forward(
        self, x_BTD: Tensor, angles: tuple[Tensor, Tensor], documents_BT: Tensor | None = None
    ) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        # A layer has either attention or a delta net.
        mixer = self.attn if self.attn is not None else self.delta
        assert mixer is not None
        x_BTD = x_BTD + mixer(self.attn_norm(x_BTD), angles, documents_BT)
        return x_BTD + self.moe(self.ffn_norm(x_BTD), documents_BT)


class Model(Decoder):
    """A Qwen3-Next without its multi-token prediction module.

    Raises:
        ConfigError: linear_value_heads is not a multiple of linear_key_heads, or rotary_pct leaves no pairs.
    """

    def __init__(self, c: Config) -> None:
        if c.linear_value_heads % c.linear_key_heads:
            raise ConfigError(
                Problem(
                    "model.overrides.linear_value_heads",
                    c.linear_value_heads,
                    rule=f"must be a multiple of linear_key_heads={c.linear_key_heads}",
                    fix="use a multiple",
                )
            )
        if c.rotary_dim < 2 or c.rotary_dim % 2:
            raise ConfigError(
                Problem(
                    "model.overrides.rotary_pct",
                    c.rotary_pct,
                    rule=(
                        f"rotates {c.rotary_dim} of the {c.head_dim} features of a head; rotary positions need pairs"
                    ),
                    fix="use 0.25, 0.5 or 1",
                )
            )
        rope = RotaryAngles(c.rotary_dim, c.rope_theta)
        norm = ZeroCenteredNorm(c.dim, c.norm_eps)
        layers = [
            Qwen3NextBlock(c, has_attention=(i + 1) % c.full_attention_interval == 0)
            for i in range(c.num_layers)
        ]
        super().__init__(c.vocab_size, c.dim, rope, layers, norm, c.tied_embeddings)


def initial(c: Config) -> dict[str, Draw]:
    """Return the initial distribution per parameter pattern; the first match wins.

    All matrices have the same standard deviation. Decays are like in Mamba-2, with a uniform A. Filters
    have PyTorch's default for a convolution.
    """
    normal = Draw("normal", std=c.init_std)
    return {
        "norm.weight": Draw("zeros"),
        "layers.*.*_norm.weight": Draw("zeros"),
        "layers.*.attn.*_norm.weight": Draw("zeros"),
        "layers.*.delta.norm.weight": Draw("ones"),
        "layers.*.delta.a_log.weight": Draw("log_uniform", low=0.01, high=16.0),
        "layers.*.delta.dt_bias.weight": Draw("ones"),
        "layers.*.delta.filters.weight": Draw("uniform", std=(3 * c.linear_conv_width) ** -0.5),
        "layers.*.delta.w*.weight": normal,
        "layers.*.attn.w?.weight": normal,
        "layers.*.moe.shared.w?.weight": normal,
        "layers.*.moe.shared_gate.weight": normal,
        "embed.weight": normal,
        "head.weight": normal,
        **expert_draws(c.init_std, "none"),
    }


FLAVORS = {
    "debugmodel": {
        "vocab_size": 2048,
        "dim": 256,
        "num_layers": 4,
        "full_attention_interval": 2,
        "num_heads": 8,
        "head_dim": 64,
        "linear_key_heads": 4,
        "linear_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "moe_ffn_dim": 128,
        "shared_ffn_dim": 128,
        "num_experts": 16,
        "top_k": 4,
    },
    "80B-A3B": {},
}
