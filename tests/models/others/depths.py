"""Mixture of depths (Raposo et al. 2024) with its causal router: a score per token decides if a layer applies to it."""

from dataclasses import dataclass

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
        "layers.*.router": "router",
        "layers.*.attn": "gather",
        "layers.*.attn.[qkv]": "colwise",
        "layers.*.attn.o": "rowwise",
        "layers.*.mlp": "gather",
        "layers.*.mlp.up": "colwise",
        "layers.*.mlp.down": "rowwise",
        "norm": "sequence",
        "head": "head",
    },
    context="layers.*.attn.core",
    optional=("layers.*.router",),
)


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.up = nn.Linear(c.dim, 2 * c.dim, bias=False)
        self.down = nn.Linear(2 * c.dim, c.dim, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Core(nn.Module):
    def forward(self, q, k, v):
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.width = c.dim // c.num_heads
        self.q = nn.Linear(c.dim, c.dim, bias=False)
        self.k = nn.Linear(c.dim, c.dim, bias=False)
        self.v = nn.Linear(c.dim, c.dim, bias=False)
        self.o = nn.Linear(c.dim, c.dim, bias=False)
        self.core = Core()

    def forward(self, x, positions):
        q = self.q(x).unflatten(-1, (-1, self.width))
        k = self.k(x).unflatten(-1, (-1, self.width))
        v = self.v(x).unflatten(-1, (-1, self.width))
        scaled_positions = positions[..., None, None] / 16
        out = self.core(q * scaled_positions.cos() + k * scaled_positions.sin(), k, v)
        return self.o(out.flatten(2))


class Layer(nn.Module):
    def __init__(self, c, index):
        super().__init__()
        self.attn_norm = nn.RMSNorm(c.dim)
        self.attn = Attention(c)
        self.mlp_norm = nn.RMSNorm(c.dim)
        self.mlp = MLP(c)
        self.router = nn.Linear(c.dim, 1) if index % 2 else None

    def forward(self, x, positions):
        taken = 1.0
        if self.router is not None:
            score = self.router(x)
            taken = score.sigmoid() * (score > 0)
        y = self.attn(self.attn_norm(x), positions)
        y = y + self.mlp(self.mlp_norm(x + y))
        return x + taken * y


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.layers = nn.ModuleDict({str(i): Layer(c, i) for i in range(c.num_layers)})
        self.norm = nn.RMSNorm(c.dim)
        self.head = nn.Linear(c.dim, c.vocab_size, bias=False)

    def forward(self, tokens, positions):
        x = self.embed(tokens)
        for layer in self.layers.values():
            x = layer(x, positions)
        return self.head(self.norm(x))


def initial(c):
    return {
        "norm.weight": Draw("ones"),
        "layers.*.*norm.weight": Draw("ones"),
        "layers.*.router.weight": Draw("normal", std=0.3),
        "layers.*.router.bias": Draw("normal", std=0.3),
        "*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.bias": Draw("zeros"),
    }
