"""LFM2's short convolutions (2025): gates around a depthwise convolution, whose weights are split with the features."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout

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
        "layers.*.mlp": "gather",
        "layers.*.mlp.up": "colwise",
        "layers.*.mlp.down": "rowwise",
        "norm": "sequence",
        "head": "head",
        "layers.*.conv": "gather",
        "layers.*.conv.in_proj": "colwise",
        "layers.*.conv.dw": "per_head",
        "layers.*.conv.out_proj": "rowwise",
    },
)


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.up = nn.Linear(c.dim, c.ffn_dim, bias=False)
        self.down = nn.Linear(c.ffn_dim, c.dim, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Depthwise(nn.Module):
    """Causal depthwise convolution. The rows of the weight are split with the features."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, 1, 3))

    def forward(self, x):
        y = F.conv1d(F.pad(x.transpose(1, 2), (2, 0)), self.weight, groups=self.weight.size(0))
        return y.transpose(1, 2)


class ShortConv(nn.Module):
    """LFM2: gate, depthwise causal convolution, gate."""

    def __init__(self, c):
        super().__init__()
        self.in_proj = nn.Linear(c.dim, 3 * c.dim, bias=False)
        self.out_proj = nn.Linear(c.dim, c.dim, bias=False)
        self.dw = Depthwise(c.dim)

    def forward(self, x):
        b, g, y = self.in_proj(x).unflatten(-1, (-1, 3)).unbind(-1)
        y = self.dw(b * y)
        return self.out_proj(g * y)


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv_norm = nn.RMSNorm(c.dim)
        self.mlp_norm = nn.RMSNorm(c.dim)
        self.conv = ShortConv(c)
        self.mlp = MLP(c)

    def forward(self, x):
        x = x + self.conv(self.conv_norm(x))
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
            x = layer(x)
        return self.head(self.norm(x))


def initial(c):
    return {
        "norm.weight": Draw("ones"),
        "layers.*.*_norm.weight": Draw("ones"),
        "*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.weight": Draw("normal", std=0.1),
    }
