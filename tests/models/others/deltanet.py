"""Gated DeltaNet (Yang et al. 2024): the memory erases its prediction for a key before it stores the value."""

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


LAYOUT = Layout(
    first=("embed",),
    layers="layers",
    last=("norm", "head"),
    tensor={
        "embed": "embed",
        "layers.*.*norm": "sequence",
        "layers.*.delta": "gather",
        "layers.*.delta.[qkvz]": "colwise",
        "layers.*.delta.beta": "colwise",
        "layers.*.delta.alpha": "colwise",
        "layers.*.delta.conv": "per_head",
        "layers.*.delta.a": "per_head",
        "layers.*.delta.head_norm": "heads",
        "layers.*.delta.out": "rowwise",
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


class Conv(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 1, 4))

    def forward(self, x):
        y = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), self.weight, groups=self.weight.size(0))
        return F.silu(y.transpose(1, 2))


class Decay(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))

    def forward(self, a):
        return -self.A_log.exp() * F.softplus(a + self.dt_bias)


class Delta(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.width = c.dim // c.num_heads
        self.q = nn.Linear(c.dim, c.dim, bias=False)
        self.k = nn.Linear(c.dim, c.dim, bias=False)
        self.v = nn.Linear(c.dim, c.dim, bias=False)
        self.z = nn.Linear(c.dim, c.dim, bias=False)
        self.out = nn.Linear(c.dim, c.dim, bias=False)
        self.alpha = nn.Linear(c.dim, c.num_heads, bias=False)
        self.beta = nn.Linear(c.dim, c.num_heads, bias=False)
        self.conv = Conv(c.dim)
        self.a = Decay(c.num_heads)
        self.head_norm = nn.RMSNorm(self.width)

    def forward(self, x):
        q = self.conv(self.q(x)).unflatten(-1, (-1, self.width))
        k = self.conv(self.k(x)).unflatten(-1, (-1, self.width))
        v = self.conv(self.v(x)).unflatten(-1, (-1, self.width))
        q = F.normalize(q, dim=-1)
        k = F.normalize(k, dim=-1)
        beta = self.beta(x).sigmoid()[..., None]
        keep = self.a(self.alpha(x)).exp()[..., None, None]
        memory = q.new_zeros(x.size(0), q.size(2), self.width, self.width)
        out = []
        for t in range(x.size(1)):
            memory = memory * keep[:, t]
            prediction = (memory * k[:, t, :, :, None]).sum(2)
            memory = (
                memory + k[:, t, :, :, None] * (beta[:, t] * (v[:, t] - prediction))[:, :, None]
            )
            out.append((memory * q[:, t, :, :, None]).sum(2))
        y = self.head_norm(torch.stack(out, 1)).flatten(2)
        return self.out(y * F.silu(self.z(x)))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.mix_norm = nn.RMSNorm(c.dim)
        self.delta = Delta(c)
        self.mlp_norm = nn.RMSNorm(c.dim)
        self.mlp = MLP(c)

    def forward(self, x):
        x = x + self.delta(self.mix_norm(x))
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
        "layers.*.delta.conv.weight": Draw("normal", std=0.5),
        "layers.*.delta.a.*": Draw("normal", std=0.5),
        "layers.*.delta.head_norm.weight": Draw("ones"),
        "*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.bias": Draw("zeros"),
    }
