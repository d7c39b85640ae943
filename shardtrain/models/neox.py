"""GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023): parallel attention and
feed-forward, with biases.

A layer adds the outputs of both to its input. Each has its own LayerNorm. Only a quarter of each
head is rotary.
Shape suffixes: B batch, T tokens, D model, N heads, H head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.hub_formats.neox_format import HUB
from shardtrain.layout import Draw, Layout
from shardtrain.models.layers import (
    AttentionCore,
    Decoder,
    RotaryAngles,
    rotate,
    scaled_equally,
)
from shardtrain.utils.errors import ConfigError, Problem

__all__ = ["FLAVORS", "HUB", "LAYOUT", "Config", "Model", "initial"]


@dataclass(frozen=True)
class Config:
    """The shape of a GPT-NeoX; each field can be set by ``model.overrides``.

    ``rotary_pct`` is the rotary fraction of a head. Without ``use_parallel_residual`` the
    feed-forward follows the attention. ``hidden_act`` is "gelu", or "gelu_tanh" for the
    approximation that NeoX-20B was trained with.
    """

    # Sizes.
    vocab_size: int = 50432
    dim: int = 6144
    num_layers: int = 44
    num_heads: int = 64
    head_dim: int = 96
    ffn_dim: int = 24576
    # The feed-forward, positions and norms.
    hidden_act: str = "gelu"
    rotary_pct: float = 0.25
    use_parallel_residual: bool = True
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tied_embeddings: bool = False

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
        "layers.*.attn.wo": "rowwise",
        "layers.*.ffn_norm": "sequence",
        "layers.*.ffn": "gather",
        "layers.*.ffn.w1": "colwise",
        "layers.*.ffn.w2": "rowwise",
        "norm": "sequence",
        "head": "head",
    },
    context="layers.*.attn.core",
)


class NeoxAttention(nn.Module):
    """Attention with rotary positions on the first ``rotary_dim`` features of each head."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.rotary_dim = c.rotary_dim
        self.wq = nn.Linear(c.dim, c.num_heads * c.head_dim)
        self.wk = nn.Linear(c.dim, c.num_heads * c.head_dim)
        self.wv = nn.Linear(c.dim, c.num_heads * c.head_dim)
        self.core = AttentionCore()
        self.wo = nn.Linear(c.num_heads * c.head_dim, c.dim)

    def forward(
        self, x_BTD: Tensor, angles: tuple[Tensor, Tensor], documents_BT: Tensor | None = None
    ) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        # Split the features into heads.
        q_BTNH = self.wq(x_BTD).unflatten(-1, (-1, self.head_dim))
        k_BTNH = self.wk(x_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTNH = self.wv(x_BTD).unflatten(-1, (-1, self.head_dim))
        # Only the first features of a head depend on the position.
        q_BTNH = self._rotate_part(q_BTNH, angles)
        k_BTNH = self._rotate_part(k_BTNH, angles)
        out_BTNH = self.core(q_BTNH, k_BTNH, v_BTNH, documents_BT)
        return self.wo(out_BTNH.flatten(2))

    def qk_clip_powers(self) -> dict[str, list[float]]:
        """Return the powers of the clipping factor, see ``distributed/qk_clip.py``."""
        return scaled_equally(self.head_dim)

    def _rotate_part(self, x_BTNH: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        rotary, unchanged = x_BTNH.tensor_split((self.rotary_dim,), dim=-1)
        return torch.cat((rotate(rotary, angles), unchanged), dim=-1)


class NeoxFeedForward(nn.Module):
    """Feed-forward with biases: w2(gelu(w1 x))."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.approximate = "tanh" if c.hidden_act == "gelu_tanh" else "none"
        self.w1 = nn.Linear(c.dim, c.ffn_dim)
        self.w2 = nn.Linear(c.ffn_dim, c.dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        return self.w2(F.gelu(self.w1(x_BTD), approximate=self.approximate))


class NeoxBlock(nn.Module):
    """One layer: attention and feed-forward, in parallel or sequentially, added to the residual stream."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.parallel = c.use_parallel_residual
        self.attn_norm = nn.LayerNorm(c.dim, eps=c.norm_eps)
        self.attn = NeoxAttention(c)
        self.ffn_norm = nn.LayerNorm(c.dim, eps=c.norm_eps)
        self.ffn = NeoxFeedForward(c)

    def forward(
        self, x_BTD: Tensor, angles: tuple[Tensor, Tensor], documents_BT: Tensor | None = None
    ) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        # In parallel, both branches read the input of the layer. Otherwise one follows the other.
        attended_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), angles, documents_BT)
        ffn_input_BTD = x_BTD if self.parallel else attended_BTD
        return attended_BTD + self.ffn(self.ffn_norm(ffn_input_BTD))


class Model(Decoder):
    """The GPT-NeoX model. Raises ConfigError for an unknown ``hidden_act`` or an odd number of rotary features."""

    def __init__(self, c: Config) -> None:
        # Names of other programs are not accepted: the Hugging Face format translates them.
        if c.hidden_act not in ("gelu", "gelu_tanh"):
            raise ConfigError(
                Problem(
                    "model.overrides.hidden_act",
                    c.hidden_act,
                    rule="is not an activation of this model",
                    fix="use gelu, or gelu_tanh, which transformers calls gelu_fast, gelu_new and gelu_pytorch_tanh",
                )
            )
        # Rotation pairs the features.
        if not 0 < c.rotary_dim <= c.head_dim or c.rotary_dim % 2:
            raise ConfigError(
                Problem(
                    "model.overrides.rotary_pct",
                    c.rotary_pct,
                    rule=(
                        f"turns {c.rotary_dim} of the {c.head_dim} features of a head, "
                        "which must be an even number above 0"
                    ),
                    fix=_rotary_fix(c),
                )
            )
        norm = nn.LayerNorm(c.dim, eps=c.norm_eps)
        rope = RotaryAngles(c.rotary_dim, c.rope_theta)
        super().__init__(
            c.vocab_size,
            c.dim,
            rope,
            [NeoxBlock(c) for _ in range(c.num_layers)],
            norm,
            c.tied_embeddings,
        )


def _rotary_fix(c: Config) -> str:
    """Return a fix that names the nearest ``rotary_pct`` whose number of rotary features is even."""
    fractions = []
    for width in range(2, c.head_dim + 1, 2):
        fraction = width / c.head_dim
        # int() truncates the product, which may lose one feature.
        if int(c.head_dim * fraction) == width:
            fractions.append(fraction)
    if not fractions:
        return "set model.overrides.head_dim to 2 or more"
    return f"use {min(fractions, key=lambda fraction: abs(fraction - c.rotary_pct))}"


def initial(c: Config) -> dict[str, Draw]:
    """Return the initial distribution per parameter pattern; the first match wins.

    The standard deviation is sqrt(2 / (5 D)) (Nguyen and Salazar 2019), and 2 / (L sqrt(D)) for the
    matrices whose output is added to the residual stream (Wang and Komatsuzaki 2021). Source:
    GPT-NeoX, section 3.2.
    """
    # See the docstring for the source of both constants.
    small = Draw("normal", std=(2 / (5 * c.dim)) ** 0.5)
    residual = Draw("normal", std=2 / (c.num_layers * c.dim**0.5))
    return {
        "norm.weight": Draw("ones"),
        "norm.bias": Draw("zeros"),
        "layers.*.*_norm.weight": Draw("ones"),
        "layers.*.*.bias": Draw("zeros"),
        "layers.*.*.*.bias": Draw("zeros"),
        "embed.weight": small,
        "head.weight": small,
        "layers.*.attn.w[qkv].weight": small,
        "layers.*.attn.wo.weight": residual,
        "layers.*.ffn.w1.weight": small,
        "layers.*.ffn.w2.weight": residual,
    }


FLAVORS = {
    # A small model for tests.
    "debugmodel": {
        "vocab_size": 2048,
        "dim": 256,
        "num_layers": 6,
        "num_heads": 8,
        "head_dim": 32,
        "ffn_dim": 1024,
    },
    # Pythia.
    "pythia-14m": {
        "vocab_size": 50304,
        "dim": 128,
        "num_layers": 6,
        "num_heads": 4,
        "head_dim": 32,
        "ffn_dim": 512,
    },
    "pythia-31m": {
        "vocab_size": 50304,
        "dim": 256,
        "num_layers": 6,
        "num_heads": 8,
        "head_dim": 32,
        "ffn_dim": 1024,
    },
    "pythia-70m": {
        "vocab_size": 50304,
        "dim": 512,
        "num_layers": 6,
        "num_heads": 8,
        "head_dim": 64,
        "ffn_dim": 2048,
    },
    "pythia-160m": {
        "vocab_size": 50304,
        "dim": 768,
        "num_layers": 12,
        "num_heads": 12,
        "head_dim": 64,
        "ffn_dim": 3072,
    },
    "pythia-410m": {
        "vocab_size": 50304,
        "dim": 1024,
        "num_layers": 24,
        "num_heads": 16,
        "head_dim": 64,
        "ffn_dim": 4096,
    },
    "pythia-1b": {
        "vocab_size": 50304,
        "dim": 2048,
        "num_layers": 16,
        "num_heads": 8,
        "head_dim": 256,
        "ffn_dim": 8192,
    },
    "pythia-1.4b": {
        "vocab_size": 50304,
        "dim": 2048,
        "num_layers": 24,
        "num_heads": 16,
        "head_dim": 128,
        "ffn_dim": 8192,
    },
    "pythia-2.8b": {
        "vocab_size": 50304,
        "dim": 2560,
        "num_layers": 32,
        "num_heads": 32,
        "head_dim": 80,
        "ffn_dim": 10240,
    },
    "pythia-6.9b": {
        "vocab_size": 50432,
        "dim": 4096,
        "num_layers": 32,
        "num_heads": 32,
        "head_dim": 128,
        "ffn_dim": 16384,
    },
    "pythia-12b": {
        "vocab_size": 50688,
        "dim": 5120,
        "num_layers": 36,
        "num_heads": 40,
        "head_dim": 128,
        "ffn_dim": 20480,
    },
    # GPT-NeoX-20B, whose sizes are the defaults.
    "20B": {"hidden_act": "gelu_tanh"},
}
