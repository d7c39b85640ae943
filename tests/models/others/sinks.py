"""Model in the style of gpt-oss (OpenAI 2025): a learned sink per head takes part of the attention."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout
from shardtrain.models.layers import RotaryAngles, rotate


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
        "layers.*.*_norm": "sequence",
        "layers.*.attn": "gather",
        "layers.*.attn.[qkv]": "colwise",
        "layers.*.attn.sinks": "colwise",
        "layers.*.attn.out": "rowwise",
        "layers.*.mlp": "gather",
        "layers.*.mlp.up": "colwise",
        "layers.*.mlp.down": "rowwise",
        "norm": "sequence",
        "head": "head",
    },
    context="layers.*.attn.core",
)


class SinkCore(nn.Module):
    def forward(self, q, k, v, documents, sinks):
        scores = torch.einsum("btnh,bsnh->bnts", q, k) * q.size(-1) ** -0.5
        scores = scores.masked_fill(
            torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf
        )
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), -1)
        return torch.einsum("bnts,bsnh->btnh", scores.softmax(-1)[..., :-1], v)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.dim // c.num_heads
        self.q = nn.Linear(c.dim, c.dim)
        self.k = nn.Linear(c.dim, c.dim)
        self.v = nn.Linear(c.dim, c.dim)
        self.out = nn.Linear(c.dim, c.dim)
        # a table with one row, whose columns are split with the heads
        self.sinks = nn.Embedding(1, c.num_heads)
        self.core = SinkCore()

    def forward(self, x, angles):
        q = self.q(x).unflatten(-1, (-1, self.head_dim))
        k = self.k(x).unflatten(-1, (-1, self.head_dim))
        v = self.v(x).unflatten(-1, (-1, self.head_dim))
        sinks = self.sinks(torch.zeros(1, dtype=torch.long, device=q.device))[0]
        return self.out(self.core(rotate(q, angles), rotate(k, angles), v, None, sinks).flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.up = nn.Linear(c.dim, 2 * c.dim)
        self.down = nn.Linear(2 * c.dim, c.dim)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn_norm = nn.RMSNorm(c.dim, eps=1e-5)
        self.ffn_norm = nn.RMSNorm(c.dim, eps=1e-5)
        self.attn = Attention(c)
        self.mlp = MLP(c)

    def forward(self, x, angles):
        x = x + self.attn(self.attn_norm(x), angles)
        return x + self.mlp(self.ffn_norm(x))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.rope = RotaryAngles(c.dim // c.num_heads, 150000.0)
        self.layers = nn.ModuleDict({str(i): Layer(c) for i in range(c.num_layers)})
        self.norm = nn.RMSNorm(c.dim, eps=1e-5)
        self.head = nn.Linear(c.dim, c.vocab_size, bias=False)

    def forward(self, tokens, positions):
        x = self.embed(tokens)
        angles = self.rope(positions)
        for layer in self.layers.values():
            x = layer(x, angles)
        return self.head(self.norm(x))


FLAVORS = {"tiny": {}}


def initial(c):
    return {
        "norm.weight": Draw("ones"),
        "layers.*.*_norm.weight": Draw("ones"),
        "layers.*.attn.sinks.weight": Draw("normal", std=0.5),
        "layers.*.*.*.bias": Draw("normal", std=0.02),
        "*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.weight": Draw("normal", std=0.1),
    }
