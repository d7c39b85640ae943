"""nGPT (Loshchilov et al. 2024): weights and activations on a sphere, normalized in forward; learned steps."""

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
    last=("head",),
    tensor={
        "embed": "embed",
        "layers.*.attn": "gather",
        "layers.*.attn.w[qkv]": "colwise",
        "layers.*.attn.s_qk": "heads",
        "layers.*.attn.wo": "rowwise",
        "layers.*.mlp": "gather",
        "layers.*.mlp.u": "colwise",
        "layers.*.mlp.v": "colwise",
        "layers.*.mlp.o": "rowwise",
        "layers.*.step_*": "sequence",
        "head": "head",
    },
    context="layers.*.attn.core",
)


def unit(x, dim=-1):
    return x / x.norm(dim=dim, keepdim=True)


class UnitEmbedding(nn.Embedding):
    def forward(self, tokens):
        return unit(super().forward(tokens))


class UnitLinear(nn.Linear):
    """Linear layer whose rows (over the inputs) have length 1."""

    def forward(self, x):
        return F.linear(x, unit(self.weight))


class UnitOut(nn.Linear):
    """Linear layer whose columns (over the outputs) have length 1."""

    def forward(self, x):
        return F.linear(x, unit(self.weight, 0))


class UnitHead(nn.Linear):
    def forward(self, x):
        return F.linear(x, unit(self.weight)) * 10.0


class Scale(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return unit(x) * self.weight


class Step(nn.Module):
    """Move x towards y by a learned step per feature, and normalize the result to length 1."""

    def __init__(self, dim):
        super().__init__()
        self.alpha = nn.Parameter(torch.full((dim,), 0.05))

    def forward(self, x, y):
        return unit(x + self.alpha.abs() * (unit(y) - x))


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.hd = c.dim // c.num_heads
        self.wq = UnitLinear(c.dim, c.dim, bias=False)
        self.wk = UnitLinear(c.dim, c.dim, bias=False)
        self.wv = UnitLinear(c.dim, c.dim, bias=False)
        self.wo = UnitOut(c.dim, c.dim, bias=False)
        self.s_qk = Scale(self.hd)
        self.core = AttentionCore(scale=self.hd**0.5)

    def forward(self, x, angles):
        q = self.wq(x).unflatten(-1, (-1, self.hd))
        k = self.wk(x).unflatten(-1, (-1, self.hd))
        v = self.wv(x).unflatten(-1, (-1, self.hd))
        q = self.s_qk(rotate(q, angles))
        k = self.s_qk(rotate(k, angles))
        return self.wo(self.core(q, k, v).flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.u = UnitLinear(c.dim, c.ffn_dim, bias=False)
        self.v = UnitLinear(c.dim, c.ffn_dim, bias=False)
        self.o = UnitOut(c.ffn_dim, c.dim, bias=False)
        self.scale = c.dim**0.5

    def forward(self, x):
        return self.o(self.u(x) * F.silu(self.v(x) * self.scale))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn = Attention(c)
        self.mlp = MLP(c)
        self.step_a = Step(c.dim)
        self.step_m = Step(c.dim)

    def forward(self, x, angles):
        x = self.step_a(x, self.attn(x, angles))
        return self.step_m(x, self.mlp(x))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = UnitEmbedding(c.vocab_size, c.dim)
        self.rope = RotaryAngles(c.dim // c.num_heads, 10000.0)
        self.layers = nn.ModuleDict({str(i): Layer(c) for i in range(c.num_layers)})
        self.head = UnitHead(c.dim, c.vocab_size, bias=False)

    def forward(self, tokens, positions):
        x = self.embed(tokens)
        angles = self.rope(positions)
        for layer in self.layers.values():
            x = layer(x, angles)
        return self.head(x)


def initial(c):
    return {
        "*.weight": Draw("normal", std=0.1),
        "layers.*.attn.s_qk.weight": Draw("ones"),
        "layers.*.step_*.alpha": Draw("uniform", std=0.1),
        "layers.*.*.*.weight": Draw("normal", std=0.1),
    }
