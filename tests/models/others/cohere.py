"""Command R (Cohere 2024): parallel layers, LayerNorm without bias, norms per head, scaled logits."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout
from shardtrain.models.layers import AttentionCore, RotaryAngles, rotate_pairs


@dataclass(frozen=True)
class Config:
    vocab_size: int = 512
    dim: int = 32
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    ffn_dim: int = 64
    logit_scale: float = 0.25


LAYOUT = Layout(
    first=("embed",),
    layers="layers",
    last=("norm", "lm_head"),
    tensor={
        "embed": "embed",
        "layers.*.input_layernorm": "sequence",
        "layers.*.attn": "gather",
        "layers.*.attn.[qkv]": "colwise",
        "layers.*.attn.[qk]_norm": "heads",
        "layers.*.attn.o": "rowwise",
        "layers.*.mlp": "gather",
        "layers.*.mlp.gate": "colwise",
        "layers.*.mlp.up": "colwise",
        "layers.*.mlp.down": "rowwise",
        "norm": "sequence",
        "lm_head": "head",
    },
    context="layers.*.attn.core",
)


class CohereNorm(nn.Module):
    """LayerNorm without a bias, in float32."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        y = x.float()
        y = y - y.mean(-1, keepdim=True)
        return (self.weight.float() * y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)).to(
            x.dtype
        )


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.size = c.dim // c.num_heads
        self.q = nn.Linear(c.dim, c.dim, bias=False)
        self.k = nn.Linear(c.dim, c.num_kv_heads * self.size, bias=False)
        self.v = nn.Linear(c.dim, c.num_kv_heads * self.size, bias=False)
        self.q_norm = CohereNorm(self.size)
        self.k_norm = CohereNorm(self.size)
        self.core = AttentionCore()
        self.o = nn.Linear(c.dim, c.dim, bias=False)

    def forward(self, x, angles, documents_BT):
        q = self.q(x).unflatten(-1, (-1, self.size))
        k = self.k(x).unflatten(-1, (-1, self.size))
        v = self.v(x).unflatten(-1, (-1, self.size))
        q = rotate_pairs(self.q_norm(q), angles)
        k = rotate_pairs(self.k_norm(k), angles)
        return self.o(self.core(q, k, v, documents_BT).flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate = nn.Linear(c.dim, c.ffn_dim, bias=False)
        self.up = nn.Linear(c.dim, c.ffn_dim, bias=False)
        self.down = nn.Linear(c.ffn_dim, c.dim, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = CohereNorm(c.dim)
        self.attn = Attention(c)
        self.mlp = MLP(c)

    def forward(self, x, angles, documents_BT):
        y = self.input_layernorm(x)
        return x + self.attn(y, angles, documents_BT) + self.mlp(y)


class Head(nn.Linear):
    scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.rope = RotaryAngles(c.dim // c.num_heads, 8e6)
        self.layers = nn.ModuleDict({str(i): Layer(c) for i in range(c.num_layers)})
        self.norm = CohereNorm(c.dim)
        self.lm_head = Head(c.dim, c.vocab_size, bias=False)
        self.lm_head.scale = c.logit_scale

    def forward(self, tokens_BT, positions_BT, documents_BT=None):
        x = self.embed(tokens_BT)
        angles = self.rope(positions_BT)
        for layer in self.layers.values():
            x = layer(x, angles, documents_BT)
        return self.lm_head(self.norm(x))


FLAVORS = {"tiny": {}}


def initial(c):
    return {
        "norm.weight": Draw("ones"),
        "layers.*.*norm.weight": Draw("ones"),
        "layers.*.attn.*_norm.weight": Draw("ones"),
        "*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.weight": Draw("normal", std=0.1),
    }
