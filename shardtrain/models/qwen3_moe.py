"""Qwen3 with experts (Qwen team 2025): Qwen3's attention, and in each layer 128 feed-forwards of which a token uses 8.

The published models keep the load even by a loss alone (``balance_loss_coeff``); ``load_balance_coeff`` adds a bias to
the router's choice, for which their file format has no place.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardtrain.errors import ConfigError
from shardtrain.hub.format import Fields, Hub
from shardtrain.hub.words import ATTENTION as NAMES
from shardtrain.hub.words import DECODER, HEAD_NORMS, ROTARY, experts, write_decoder
from shardtrain.layout import Draw
from shardtrain.models.layers import Decoder, NormedAttention, RotaryAngles, build_norm
from shardtrain.models.moe import EXPERT_BIAS, EXPERT_WORDS, MoE, expert_draws, routing_of
from shardtrain.models.qwen3 import ATTENTION, read_qwen3
from shardtrain.models.qwen3 import LAYOUT as DENSE_LAYOUT
from shardtrain.models.qwen3 import Config as DenseConfig
from shardtrain.models.qwen3 import initial as dense_initial


@dataclass(frozen=True)
class Config(DenseConfig):
    """The shape of a Qwen3 with experts; ``ffn_dim`` is not used, each expert's is ``moe_ffn_dim``."""

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
    DENSE_LAYOUT, tensor={**ATTENTION, **EXPERT_WORDS}, expert="layers.*.moe", buffers=EXPERT_BIAS
)


class Block(nn.Module):
    """One layer: attention and experts, each behind a norm and added to the residual stream."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.attn_norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        self.attn = NormedAttention(c.dim, c.num_heads, c.num_kv_heads, c.head_dim, c.norm_eps)
        self.ffn_norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        self.moe = MoE(c.dim, c.moe_ffn_dim, routing_of(c))

    def forward(self, x_BTD: Tensor, angles: tuple[Tensor, Tensor], documents_BT: Tensor | None = None) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), angles, documents_BT)
        return x_BTD + self.moe(self.ffn_norm(x_BTD))


class Model(Decoder):
    """A Qwen3 with experts."""

    def __init__(self, c: Config) -> None:
        rope = RotaryAngles(c.head_dim, c.rope_theta)
        norm = build_norm(c.norm_type, c.dim, c.norm_eps)
        super().__init__(c.vocab_size, c.dim, rope, [Block(c) for _ in range(c.num_layers)], norm, c.tied_embeddings)


def initial(c: Config) -> dict[str, Draw]:
    """How each parameter starts, first match wins."""
    return {**dense_initial(c), **expert_draws(0.02, "layer" if c.depth_init else "total")}


FLAVORS = {
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
    "30B-A3B": {"dim": 2048, "num_layers": 48, "num_heads": 32, "num_kv_heads": 4, "moe_ffn_dim": 768},
    "235B-A22B": {"dim": 4096, "num_layers": 94, "num_heads": 64, "num_kv_heads": 4, "moe_ffn_dim": 1536},
}


def _read(f: Fields) -> dict[str, Any]:
    f.only("decoder_sparse_step", 1)
    f.only("mlp_only_layers", [])
    f.take("intermediate_size", int, 0)  # of layers without experts, of which there are none
    count = "num_local_experts" if f.take("num_experts", int, 0) == 0 else "num_experts"
    return {
        **read_qwen3(f),
        "moe_ffn_dim": f.integer("moe_intermediate_size"),
        "num_experts": f.integer(count),
        "top_k": f.integer("num_experts_per_tok"),
        "route_norm": f.flag("norm_topk_prob", False),
        "balance_loss_coeff": f.number("router_aux_loss_coef", 1e-3),
    }


def _write(c: Config) -> dict[str, Any]:
    if c.score_func != "softmax":
        raise ConfigError(f"score_func={c.score_func!r} has no place in the format of Qwen3MoeForCausalLM")
    return {
        **write_decoder(c),
        "moe_intermediate_size": c.moe_ffn_dim,
        "intermediate_size": c.moe_ffn_dim,
        "num_experts": c.num_experts,
        "num_experts_per_tok": c.top_k,
        "norm_topk_prob": c.route_norm,
        "router_aux_loss_coef": c.balance_loss_coeff,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "use_sliding_window": False,
    }


HUB = Hub(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    names={**DECODER, **NAMES, **HEAD_NORMS, **experts("model.layers.*.mlp")},
    read=_read,
    write=_write,
    ignored=ROTARY,
)
