"""KERPLE (Chi et al. 2022): a bias proportional to the logarithm of the distance, with a learned slope per head."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout
from shardtrain.models.layers import HeadNumbers, RotaryAngles

FLAVORS = {"tiny": {}}


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
        "layers.*.*_norm": "sequence",
        "layers.*.attn": "gather",
        "layers.*.attn.w[qkv]": "colwise",
        "layers.*.attn.wo": "rowwise",
        "layers.*.mlp": "gather",
        "layers.*.mlp.up": "colwise",
        "layers.*.mlp.down": "rowwise",
        "norm": "sequence",
        "head": "head",
        "layers.*.attn.slopes": "per_head",
    },
    context="layers.*.attn.core",
)


class Core(nn.Module):
    def forward(self, q, k, v, documents=None, slopes=None):
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        T = torch.arange(q.size(2), device=q.device)
        distance = (T[:, None] - T).clamp_min(0)
        s = (
            q @ k.transpose(-1, -2) / q.size(-1) ** 0.5
            - slopes.exp()[:, None, None] * (1 + distance).log()
        )
        s = s.masked_fill(T[:, None] < T, float("-inf"))
        return (s.softmax(-1) @ v).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.hd = c.dim // c.num_heads
        self.wq = nn.Linear(c.dim, c.dim, bias=False)
        self.wk = nn.Linear(c.dim, c.dim, bias=False)
        self.wv = nn.Linear(c.dim, c.dim, bias=False)
        self.wo = nn.Linear(c.dim, c.dim, bias=False)
        self.core = Core()
        self.slopes = HeadNumbers(c.num_heads)

    def forward(self, x, angles):
        q = self.wq(x).unflatten(-1, (-1, self.hd))
        k = self.wk(x).unflatten(-1, (-1, self.hd))
        v = self.wv(x).unflatten(-1, (-1, self.hd))
        out = self.core(q, k, v, None, self.slopes())
        return self.wo(out.flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.up = nn.Linear(c.dim, c.ffn_dim, bias=False)
        self.down = nn.Linear(c.ffn_dim, c.dim, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn_norm = nn.RMSNorm(c.dim)
        self.mlp_norm = nn.RMSNorm(c.dim)
        self.attn = Attention(c)
        self.mlp = MLP(c)

    def forward(self, x, angles):
        x = x + self.attn(self.attn_norm(x), angles)
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.rope = RotaryAngles(c.dim // c.num_heads, 10000.0)
        self.layers = nn.ModuleDict({str(i): Layer(c) for i in range(c.num_layers)})
        self.norm = nn.RMSNorm(c.dim)
        self.head = nn.Linear(c.dim, c.vocab_size, bias=False)

    def forward(self, tokens, positions):
        x = self.embed(tokens)
        angles = self.rope(positions)
        for layer in self.layers.values():
            x = layer(x, angles)
        return self.head(self.norm(x))


def initial(c):
    return {
        "norm.weight": Draw("ones"),
        "layers.*.*_norm.weight": Draw("ones"),
        "*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.weight": Draw("normal", std=0.1),
        "layers.*.attn.slopes.weight": Draw("normal", std=0.3),
    }
