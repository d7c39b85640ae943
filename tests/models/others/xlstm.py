"""xLSTM (Beck et al. 2024): a matrix memory with exponential gates per head, stabilized by a maximum."""

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
        "layers.*.cell": "gather",
        "layers.*.cell.[qkvo]": "colwise",
        "layers.*.cell.gates": "colwise",
        "layers.*.cell.head_norm": "heads",
        "layers.*.cell.down": "rowwise",
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


class Cell(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.width = c.dim // c.num_heads
        self.q = nn.Linear(c.dim, c.dim, bias=False)
        self.k = nn.Linear(c.dim, c.dim, bias=False)
        self.v = nn.Linear(c.dim, c.dim, bias=False)
        self.o = nn.Linear(c.dim, c.dim, bias=False)
        self.gates = nn.Linear(c.dim, 2 * c.num_heads)  # per head: input gate, forget gate
        self.head_norm = nn.RMSNorm(self.width)
        self.down = nn.Linear(c.dim, c.dim, bias=False)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (-1, self.width))
        k = self.k(x).unflatten(-1, (-1, self.width))
        v = self.v(x).unflatten(-1, (-1, self.width))
        i, f = self.gates(x).unflatten(-1, (-1, 2)).unbind(-1)
        f = F.logsigmoid(f)
        k = k * self.width**-0.5
        memory = q.new_zeros(q.size(0), q.size(2), self.width, self.width)
        total = memory[..., 0]
        top = q.new_full((q.size(0), q.size(2)), -1e4)
        out = []
        for t in range(x.size(1)):
            higher = torch.maximum(f[:, t] + top, i[:, t])
            keep = (f[:, t] + top - higher).exp()[..., None]
            take = (i[:, t] - higher).exp()[..., None]
            memory = (
                keep[..., None] * memory + take[..., None] * v[:, t, :, :, None] * k[:, t, :, None]
            )
            total = keep * total + take * k[:, t]
            top = higher
            size = (total * q[:, t]).sum(-1, keepdim=True).abs().maximum((-top).exp()[..., None])
            out.append((memory @ q[:, t, :, :, None])[..., 0] / size)
        y = self.head_norm(torch.stack(out, 1)).flatten(2)
        return self.down(self.o(x).sigmoid() * y)


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.cell_norm = nn.RMSNorm(c.dim)
        self.cell = Cell(c)
        self.mlp_norm = nn.RMSNorm(c.dim)
        self.mlp = MLP(c)

    def forward(self, x):
        x = x + self.cell(self.cell_norm(x))
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
        "layers.*.cell.gates.bias": Draw("normal", std=1.0),
        "layers.*.cell.head_norm.weight": Draw("ones"),
        "*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.bias": Draw("zeros"),
    }
