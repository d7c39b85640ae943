"""Hyena (Poli et al. 2023): gates around a convolution over the entire row. A network computes its filter."""

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


LAYOUT = Layout(
    first=("embed",),
    layers="layers",
    last=("norm", "head"),
    tensor={
        "embed": "embed",
        "layers.*.*norm": "sequence",
        "layers.*.op": "gather",
        "layers.*.op.proj": "colwise",
        "layers.*.op.short": "per_head",
        "layers.*.op.filter.into": "replicate",
        "layers.*.op.filter.out": "colwise",
        "layers.*.op.filter.skip": "per_head",
        "layers.*.op.out": "rowwise",
        "layers.*.mlp": "gather",
        "layers.*.mlp.up": "colwise",
        "layers.*.mlp.down": "rowwise",
        "norm": "sequence",
        "head": "head",
    },
)


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.up = nn.Linear(c.dim, 2 * c.dim, bias=False)
        self.down = nn.Linear(2 * c.dim, c.dim, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Short(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 1, 3))

    def forward(self, x):
        return F.conv1d(
            F.pad(x.transpose(1, 2), (2, 0)), self.weight, groups=self.weight.size(0)
        ).transpose(1, 2)


class Skip(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x):
        return x * self.weight


class Filter(nn.Module):
    """Filter values for each lag and feature, computed from sines and cosines of the lag."""

    def __init__(self, dim):
        super().__init__()
        self.into = nn.Linear(9, 16)
        self.out = nn.Linear(16, dim, bias=False)
        self.skip = Skip(dim)

    def forward(self, x):
        lag = torch.arange(x.size(1), device=x.device) / 64
        waves = lag[:, None] * torch.arange(1, 5, device=x.device)
        encoded_lag = torch.cat([lag[:, None], waves.sin(), waves.cos()], -1)
        h = self.out(self.into(encoded_lag).sin()) * (-4 * lag[:, None]).exp()
        size = 2 * x.size(1)
        y = torch.fft.irfft(torch.fft.rfft(x, size, 1) * torch.fft.rfft(h, size, 0), size, 1)[
            :, : x.size(1)
        ]
        return y + self.skip(x)


class Operator(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.proj = nn.Linear(c.dim, 3 * c.dim)
        self.out = nn.Linear(c.dim, c.dim)
        self.short = Short(3 * c.dim)
        self.filter = Filter(c.dim)

    def forward(self, x):
        a, b, v = self.short(self.proj(x)).unflatten(-1, (-1, 3)).unbind(-1)
        return self.out(a * self.filter(b * v))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.op_norm = nn.RMSNorm(c.dim)
        self.op = Operator(c)
        self.mlp_norm = nn.RMSNorm(c.dim)
        self.mlp = MLP(c)

    def forward(self, x):
        x = x + self.op(self.op_norm(x))
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
        "layers.*.*norm.weight": Draw("ones"),
        "layers.*.op.short.weight": Draw("normal", std=0.5),
        "layers.*.op.filter.skip.weight": Draw("ones"),
        "layers.*.op.filter.*.weight": Draw("normal", std=0.5),
        "layers.*.op.filter.*.bias": Draw("normal", std=0.5),
        "*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.bias": Draw("zeros"),
    }
