"""Gated attention (Qwen3-Next, 2025): a gate per feature after attention, GLU values, partial rotary angles."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout
from shardtrain.models.layers import AttentionCore

FLAVORS = {"tiny": {}}


@dataclass(frozen=True)
class Config:
    vocab_size: int = 512
    dim: int = 32
    num_layers: int = 4
    num_heads: int = 4


LAYOUT = Layout(
    first=("embed",),
    layers="layers",
    last=("norm", "head"),
    tensor={
        "embed": "embed",
        "layers.*.*norm": "sequence",
        "layers.*.attn": "gather",
        "layers.*.attn.[!on]": "colwise",
        "layers.*.attn.n[qk]": "heads",
        "layers.*.attn.o": "rowwise",
        "layers.*.mlp": "gather",
        "layers.*.mlp.up": "colwise",
        "layers.*.mlp.down": "rowwise",
        "norm": "sequence",
        "head": "head",
    },
    context="layers.*.attn.core",
)


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.up = nn.Linear(c.dim, 2 * c.dim, bias=False)
        self.down = nn.Linear(2 * c.dim, c.dim, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


def rotary(x, positions):
    rotated, unrotated = x.chunk(2, -1)
    half = rotated.size(-1) // 2
    angles = positions[..., None, None] * 1000.0 ** (-torch.arange(half, device=x.device) / half)
    a, b = rotated.chunk(2, -1)
    return torch.cat(
        [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), unrotated], -1
    )


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.width = c.dim // c.num_heads
        self.q = nn.Linear(c.dim, 2 * c.dim, bias=False)  # per head: a query and its gate
        self.k = nn.Linear(c.dim, c.dim, bias=False)
        self.v = nn.Linear(c.dim, c.dim, bias=False)
        self.u = nn.Linear(c.dim, c.dim, bias=False)
        self.o = nn.Linear(c.dim, c.dim, bias=False)
        self.nq = nn.RMSNorm(self.width)
        self.nk = nn.RMSNorm(self.width)
        self.core = AttentionCore()

    def forward(self, x, positions):
        q, gate = self.q(x).unflatten(-1, (-1, 2 * self.width)).chunk(2, -1)
        k = self.k(x).unflatten(-1, (-1, self.width))
        v = (F.silu(self.u(x)) * self.v(x)).unflatten(-1, (-1, self.width))
        y = self.core(rotary(self.nq(q), positions), rotary(self.nk(k), positions), v)
        return self.o((y * gate.sigmoid()).flatten(2))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn_norm = nn.RMSNorm(c.dim)
        self.attn = Attention(c)
        self.mlp_norm = nn.RMSNorm(c.dim)
        self.mlp = MLP(c)

    def forward(self, x, positions):
        x = x + self.attn(self.attn_norm(x), positions)
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.layers = nn.ModuleDict({str(i): Layer(c) for i in range(c.num_layers)})
        self.norm = nn.RMSNorm(c.dim)
        self.head = nn.Linear(c.dim, c.vocab_size, bias=False)

    def forward(self, tokens, positions):
        x = self.embed(tokens)
        for layer in self.layers.values():
            x = layer(x, positions)
        return self.head(self.norm(x))


def initial(c):
    return {
        "norm.weight": Draw("ones"),
        "layers.*.*norm.weight": Draw("ones"),
        "layers.*.attn.n[qk].weight": Draw("ones"),
        "*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.bias": Draw("zeros"),
    }
