"""Gemma 2 (2024): scaled embedding, (1 + w) norms before and after, soft caps, a window in every other layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout
from shardtrain.models.layers import AttentionCore, RotaryAngles, rotate


@dataclass(frozen=True)
class Config:
    vocab_size: int = 512
    dim: int = 32
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    ffn_dim: int = 64
    query_pre_attn_scalar: float = 20.0
    attn_logit_softcapping: float = 5.0
    final_logit_softcapping: float = 3.0
    sliding_window: int = 21
    tied_embeddings: bool = True


LAYOUT = Layout(
    first=("embed_tokens",),
    layers="layers",
    last=("norm", "lm_head"),
    tensor={
        "embed_tokens": "embed",
        "layers.*.*_layernorm": "sequence",
        "layers.*.self_attn": "gather",
        "layers.*.self_attn.[qkv]_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp": "gather",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
        "norm": "sequence",
        "lm_head": "head",
    },
    context="layers.*.self_attn.core",
)


class ScaledEmbedding(nn.Embedding):
    def forward(self, tokens):
        return super().forward(tokens) * self.embedding_dim**0.5


class CappedHead(nn.Linear):
    def __init__(self, dim, vocab, cap):
        super().__init__(dim, vocab, bias=False)
        self.cap = cap

    def forward(self, x):
        return self.cap * torch.tanh(super().forward(x) / self.cap)


class Norm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return (
            F.rms_norm(x.float(), x.shape[-1:], eps=1e-6) * (1.0 + self.weight.float())
        ).type_as(x)


class Attention(nn.Module):
    def __init__(self, c, window):
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.dim, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.dim, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.dim, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.dim, bias=False)
        self.core = AttentionCore(window, c.query_pre_attn_scalar**-0.5, c.attn_logit_softcapping)

    def forward(self, x, angles, documents_BT):
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        out = self.core(rotate(q, angles), rotate(k, angles), v, documents_BT)
        return self.o_proj(out.flatten(2))


class GeGLU(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.dim, c.ffn_dim, bias=False)
        self.up_proj = nn.Linear(c.dim, c.ffn_dim, bias=False)
        self.down_proj = nn.Linear(c.ffn_dim, c.dim, bias=False)

    def forward(self, x):
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c, window):
        super().__init__()
        self.self_attn = Attention(c, window)
        self.mlp = GeGLU(c)
        self.input_layernorm = Norm(c.dim)
        self.post_attention_layernorm = Norm(c.dim)
        self.pre_feedforward_layernorm = Norm(c.dim)
        self.post_feedforward_layernorm = Norm(c.dim)

    def forward(self, x, angles, documents_BT):
        x = x + self.post_attention_layernorm(
            self.self_attn(self.input_layernorm(x), angles, documents_BT)
        )
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = ScaledEmbedding(c.vocab_size, c.dim)
        self.rotary = RotaryAngles(c.head_dim, 10000.0)
        layers = (Layer(c, c.sliding_window if i % 2 == 0 else 0) for i in range(c.num_layers))
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)})
        self.norm = Norm(c.dim)
        self.lm_head = CappedHead(c.dim, c.vocab_size, c.final_logit_softcapping)
        if c.tied_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens_BT, positions_BT, documents_BT=None):
        x = self.embed_tokens(tokens_BT)
        angles = self.rotary(positions_BT)
        for layer in self.layers.values():
            x = layer(x, angles, documents_BT)
        return self.lm_head(self.norm(x))


FLAVORS = {"tiny": {}, "2B": {"vocab_size": 256000, "dim": 2304, "num_layers": 26, "num_heads": 8, "num_kv_heads": 4,
                             "head_dim": 256, "ffn_dim": 9216, "query_pre_attn_scalar": 256.0, "sliding_window": 4096,
                             "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}}  # fmt: skip


def initial(c):
    return {
        "norm.weight": Draw("zeros"),
        "layers.*.*_layernorm.weight": Draw("normal", std=0.1),
        "*.weight": Draw("normal", std=0.05),
        "layers.*.*.*.weight": Draw("normal", std=0.1),
    }
