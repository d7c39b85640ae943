"""Differential attention (Ye et al. 2024): the difference of two attention maps, with two core calls per layer."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout
from shardtrain.models.layers import AttentionCore, RotaryAngles, rotate

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
        "layers.*.attn.lam": "heads",
        "layers.*.attn.head_norm": "heads",
    },
    context="layers.*.attn.core",
)


class Lambda(nn.Module):
    """Learned factor of the second map: exp(q1 k1) - exp(q2 k2) + a constant that grows with depth."""

    def __init__(self, hd, i):
        super().__init__()
        self.start = 0.8 - 0.6 * math.exp(-0.3 * i)
        self.q1 = nn.Parameter(torch.zeros(hd))
        self.k1 = nn.Parameter(torch.zeros(hd))
        self.q2 = nn.Parameter(torch.zeros(hd))
        self.k2 = nn.Parameter(torch.zeros(hd))

    def forward(self, y):
        lam = (self.q1 * self.k1).sum().exp() - (self.q2 * self.k2).sum().exp() + self.start
        return lam * y


class Attention(nn.Module):
    def __init__(self, c, i):
        super().__init__()
        self.hd = c.dim // c.num_heads
        self.wq = nn.Linear(c.dim, c.dim, bias=False)
        self.wk = nn.Linear(c.dim, c.dim, bias=False)
        self.wv = nn.Linear(c.dim, c.dim, bias=False)
        self.wo = nn.Linear(c.dim, c.dim, bias=False)
        self.lam = Lambda(self.hd, i)
        self.head_norm = nn.RMSNorm(2 * self.hd)
        self.core = AttentionCore()

    def forward(self, x, angles):
        q = rotate(self.wq(x).unflatten(-1, (-1, self.hd)), angles)
        k = rotate(self.wk(x).unflatten(-1, (-1, self.hd)), angles)
        v = self.wv(x).unflatten(-1, (-1, 2, self.hd))
        # heads 2n and 2n + 1 are the two maps of pair n; both read the pair's two values
        first = self.core(q, k, v[..., 0, :].repeat_interleave(2, 2)).unflatten(2, (-1, 2))
        second = self.core(q, k, v[..., 1, :].repeat_interleave(2, 2)).unflatten(2, (-1, 2))
        values = torch.cat([first, second], -1)
        y = values[..., 0, :] - self.lam(values[..., 1, :])
        return self.wo((self.head_norm(y) * (1 - self.lam.start)).flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.up = nn.Linear(c.dim, c.ffn_dim, bias=False)
        self.down = nn.Linear(c.ffn_dim, c.dim, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Layer(nn.Module):
    def __init__(self, c, i):
        super().__init__()
        self.attn_norm = nn.RMSNorm(c.dim)
        self.mlp_norm = nn.RMSNorm(c.dim)
        self.attn = Attention(c, i)
        self.mlp = MLP(c)

    def forward(self, x, angles):
        x = x + self.attn(self.attn_norm(x), angles)
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.rope = RotaryAngles(c.dim // c.num_heads, 10000.0)
        self.layers = nn.ModuleDict({str(i): Layer(c, i) for i in range(c.num_layers)})
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
        "layers.*.attn.lam.*": Draw("normal", std=0.1),
        "layers.*.attn.head_norm.weight": Draw("ones"),
    }
