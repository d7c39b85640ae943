"""Model in RetNet's style (Sun et al. 2023): retention, a sum with a decay rate per head, and a norm per head."""

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
        "layers.*.ret": "gather",
        "layers.*.ret.[qkvg]": "colwise",
        "layers.*.ret.pace": "per_head",
        "layers.*.ret.group": "heads",
        "layers.*.ret.out": "rowwise",
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


class Pace(nn.Module):
    """Multiply scores by a causal decay over distance, with a learned rate per head."""

    def __init__(self, heads):
        super().__init__()
        self.rate = nn.Parameter(torch.empty(heads))

    def forward(self, scores):
        T = torch.arange(scores.size(-1), device=scores.device)
        lag = (T[:, None] - T).clamp_min(0)
        decay = F.logsigmoid(3.0 + self.rate)[:, None, None] * lag
        return scores * decay.exp() * (T[:, None] >= T)


class Retention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.width = c.dim // c.num_heads
        self.q = nn.Linear(c.dim, c.dim, bias=False)
        self.k = nn.Linear(c.dim, c.dim, bias=False)
        self.v = nn.Linear(c.dim, c.dim, bias=False)
        self.g = nn.Linear(c.dim, c.dim, bias=False)
        self.out = nn.Linear(c.dim, c.dim, bias=False)
        self.pace = Pace(c.num_heads)
        self.group = nn.LayerNorm(self.width)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
        decayed = self.pace(q @ k.transpose(-1, -2) * self.width**-0.5)
        y = self.group((decayed @ v).transpose(1, 2)).flatten(2)
        return self.out(F.silu(self.g(x)) * y)


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ret_norm = nn.RMSNorm(c.dim)
        self.ret = Retention(c)
        self.mlp_norm = nn.RMSNorm(c.dim)
        self.mlp = MLP(c)

    def forward(self, x):
        x = x + self.ret(self.ret_norm(x))
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
        "layers.*.ret.pace.rate": Draw("normal", std=0.5),
        "layers.*.ret.group.weight": Draw("ones"),
        "*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.bias": Draw("zeros"),
    }
