"""OLMo 2 (OLMo team 2024): norms after attention and feed-forward, and over all heads of queries and keys."""

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
    ffn_dim: int = 64
    rope_theta: float = 500000.0
    eps: float = 1e-6


LAYOUT = Layout(
    first=("embed_tokens",),
    layers="layers",
    last=("norm", "lm_head"),
    tensor={
        "embed_tokens": "embed",
        "layers.*.self_attn": "gather",
        "layers.*.self_attn.[qkv]_proj": "colwise",
        "layers.*.self_attn.[qk]_norm": "features",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp": "gather",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
        "layers.*.post_*_layernorm": "sequence",
        "norm": "sequence",
        "lm_head": "head",
    },
    context="layers.*.self_attn.core",
)


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * y).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.dim // c.num_heads
        self.q_proj = nn.Linear(c.dim, c.dim, bias=False)
        self.k_proj = nn.Linear(c.dim, c.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(c.dim, c.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(c.dim, c.dim, bias=False)
        self.q_norm = RMSNorm(c.dim, c.eps)
        self.k_norm = RMSNorm(c.num_kv_heads * self.head_dim, c.eps)
        self.core = AttentionCore()

    def forward(self, x, angles, documents_BT):
        q = self.q_norm(self.q_proj(x))
        k = self.k_norm(self.k_proj(x))
        v = self.v_proj(x)
        q = q.unflatten(-1, (-1, self.head_dim))
        k = k.unflatten(-1, (-1, self.head_dim))
        v = v.unflatten(-1, (-1, self.head_dim))
        out = self.core(rotate(q, angles), rotate(k, angles), v, documents_BT)
        return self.o_proj(out.flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.dim, c.ffn_dim, bias=False)
        self.up_proj = nn.Linear(c.dim, c.ffn_dim, bias=False)
        self.down_proj = nn.Linear(c.ffn_dim, c.dim, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.post_attention_layernorm = RMSNorm(c.dim, c.eps)
        self.post_feedforward_layernorm = RMSNorm(c.dim, c.eps)

    def forward(self, x, angles, documents_BT):
        x = x + self.post_attention_layernorm(self.self_attn(x, angles, documents_BT))
        return x + self.post_feedforward_layernorm(self.mlp(x))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.dim)
        self.rotary = RotaryAngles(c.dim // c.num_heads, c.rope_theta)
        self.layers = nn.ModuleDict({str(i): Layer(c) for i in range(c.num_layers)})
        self.norm = RMSNorm(c.dim, c.eps)
        self.lm_head = nn.Linear(c.dim, c.vocab_size, bias=False)

    def forward(self, tokens, positions, documents_BT=None):
        x = self.embed_tokens(tokens)
        angles = self.rotary(positions)
        for layer in self.layers.values():
            x = layer(x, angles, documents_BT)
        return self.lm_head(self.norm(x))


FLAVORS = {"tiny": {}}


def initial(c):
    return {
        "*norm.weight": Draw("ones"),
        "layers.*.*norm.weight": Draw("ones"),
        "layers.*.*.*_norm.weight": Draw("ones"),
        "*.weight": Draw("normal", std=0.05),
        "layers.*.*.*.weight": Draw("normal", std=0.05),
    }
