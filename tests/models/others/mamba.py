"""Model in Mamba's style (Gu and Dao 2023): a selective scan with its full state on every rank, and no feed-forward."""

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
    states: int = 4
    dt_rank: int = 2


LAYOUT = Layout(
    first=("embed",),
    layers="layers",
    last=("norm", "head"),
    tensor={
        "embed": "embed",
        "layers.*.*norm": "sequence",
        "layers.*.mixer": "gather",
        "layers.*.mixer.in_proj": "replicate",
        "layers.*.mixer.conv": "replicate",
        "layers.*.mixer.scan": "replicate",
        "layers.*.mixer.scan.x_proj": "replicate",
        "layers.*.mixer.scan.dt_proj": "replicate",
        "layers.*.mixer.out_proj": "rowwise",
        "norm": "sequence",
        "head": "head",
    },
)


class Conv(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 1, 4))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x):
        y = F.conv1d(
            F.pad(x.transpose(1, 2), (3, 0)), self.weight, self.bias, groups=self.weight.size(0)
        )
        return y.transpose(1, 2)


class Scan(nn.Module):
    """h = exp(dt A) h + dt B x, y = C h + D x, with dt, B and C computed per token."""

    def __init__(self, c, width):
        super().__init__()
        self.rank = c.dt_rank
        self.states = c.states
        self.x_proj = nn.Linear(width, c.dt_rank + 2 * c.states, bias=False)
        self.dt_proj = nn.Linear(c.dt_rank, width)
        self.A_log = nn.Parameter(torch.empty(width, c.states))
        self.D = nn.Parameter(torch.empty(width))

    def forward(self, x):
        dt, B, C = self.x_proj(x).split([self.rank, self.states, self.states], -1)
        dt = F.softplus(self.dt_proj(dt))
        A = -self.A_log.exp()
        h = x.new_zeros(x.size(0), x.size(2), self.states)
        out = []
        for t in range(x.size(1)):
            h = h * (dt[:, t, :, None] * A).exp() + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
            out.append((h * C[:, t, None]).sum(-1))
        return torch.stack(out, 1) + self.D * x


class Mixer(nn.Module):
    def __init__(self, c):
        super().__init__()
        width = 2 * c.dim
        self.in_proj = nn.Linear(c.dim, 2 * width, bias=False)
        self.out_proj = nn.Linear(width, c.dim, bias=False)
        self.conv = Conv(width)
        self.scan = Scan(c, width)

    def forward(self, x):
        x, z = self.in_proj(x).chunk(2, -1)
        return self.out_proj(self.scan(F.silu(self.conv(x))) * F.silu(z))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.mix_norm = nn.RMSNorm(c.dim)
        self.mixer = Mixer(c)

    def forward(self, x):
        return x + self.mixer(self.mix_norm(x))


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
        "layers.*.mixer.conv.*": Draw("normal", std=0.3),
        "layers.*.mixer.scan.A_log": Draw("normal", std=0.5),
        "layers.*.mixer.scan.D": Draw("ones"),
        "layers.*.mixer.scan.*.bias": Draw("normal", std=0.5),
        "layers.*.mixer.scan.*.weight": Draw("normal", std=0.2),
        "*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.bias": Draw("zeros"),
    }
