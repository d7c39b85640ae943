"""NormFormer and Swin 2: cosine attention with a learned temperature, a norm in the feed-forward, sandwich norms."""

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
    ffn_dim: int = 64


LAYOUT = Layout(
    first=("embed",),
    layers="layers",
    last=("norm", "head"),
    tensor={
        "embed": "embed",
        "layers.*.norm_*": "sequence",
        "layers.*.attn": "gather",
        "layers.*.attn.[qkv]": "colwise",
        "layers.*.attn.temperature": "heads",
        "layers.*.attn.out_norm": "features",
        "layers.*.attn.out": "rowwise",
        "layers.*.ffn": "gather",
        "layers.*.ffn.up": "colwise",
        "layers.*.ffn.norm": "features",
        "layers.*.ffn.down": "rowwise",
        "norm": "sequence",
        "head": "head",
    },
    context="layers.*.attn.core",
)


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.zeros(1))

    def forward(self, q):
        return q * self.log.exp()


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.dim // c.num_heads
        self.q = nn.Linear(c.dim, c.dim)
        self.k = nn.Linear(c.dim, c.dim)
        self.v = nn.Linear(c.dim, c.dim)
        self.out = nn.Linear(c.dim, c.dim)
        self.temperature = Temperature()
        self.core = AttentionCore(scale=1.0)
        self.out_norm = nn.LayerNorm(c.dim)

    def forward(self, x, angles):
        q = self.q(x).unflatten(-1, (-1, self.head_dim))
        k = self.k(x).unflatten(-1, (-1, self.head_dim))
        v = self.v(x).unflatten(-1, (-1, self.head_dim))
        q = F.normalize(rotate(q, angles), dim=-1)
        k = F.normalize(rotate(k, angles), dim=-1)
        return self.out(self.out_norm(self.core(self.temperature(q), k, v).flatten(2)))


class FeedForward(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.up = nn.Linear(c.dim, c.ffn_dim)
        self.norm = nn.LayerNorm(c.ffn_dim)
        self.down = nn.Linear(c.ffn_dim, c.dim)

    def forward(self, x):
        return self.down(self.norm(F.gelu(self.up(x))))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm_in = nn.LayerNorm(c.dim)
        self.norm_out = nn.LayerNorm(c.dim)
        self.norm_ffn = nn.LayerNorm(c.dim)
        self.attn = Attention(c)
        self.ffn = FeedForward(c)

    def forward(self, x, angles):
        x = x + self.norm_out(self.attn(self.norm_in(x), angles))
        return x + self.ffn(self.norm_ffn(x))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.rope = RotaryAngles(c.dim // c.num_heads, 10000.0)
        self.layers = nn.ModuleDict({str(i): Layer(c) for i in range(c.num_layers)})
        self.norm = nn.LayerNorm(c.dim)
        self.head = nn.Linear(c.dim, c.vocab_size)

    def forward(self, tokens, positions):
        x = self.embed(tokens)
        angles = self.rope(positions)
        for layer in self.layers.values():
            x = layer(x, angles)
        return self.head(self.norm(x))


FLAVORS = {"tiny": {}}


def initial(c):
    norms = ("norm", "layers.*.norm_*", "layers.*.*.*norm")
    return {
        **{f"{name}.weight": Draw("ones") for name in norms},
        "*.bias": Draw("zeros"),
        "layers.*.*.bias": Draw("zeros"),
        "layers.*.*.*.bias": Draw("normal", std=0.1),
        "layers.*.attn.temperature.log": Draw("ones"),
        "*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.weight": Draw("normal", std=0.2),
    }
