"""A model file that computes in any precision and keeps a float32 residual stream, in which faults are planted."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout


@dataclass(frozen=True)
class Config:
    vocab_size: int = 96
    dim: int = 32
    num_layers: int = 2
    num_heads: int = 4


FLAVORS = {"small": {}}
LAYOUT = Layout(
    first=("embed",),
    layers="blocks",
    last=("norm", "head"),
    tensor={
        "embed": "embed",
        "blocks.*.attn_norm": "sequence",
        "blocks.*.attn": "gather",
        "blocks.*.attn.[qkv]": "colwise",
        "blocks.*.attn.out": "rowwise",
        "blocks.*.ffn_norm": "sequence",
        "blocks.*.ffn": "gather",
        "blocks.*.ffn.up": "colwise",
        "blocks.*.ffn.down": "rowwise",
        "norm": "sequence",
        "head": "head",
    },
    context="blocks.*.attn.core",
)


class Core(nn.Module):
    def forward(self, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Norm(nn.LayerNorm):
    def forward(self, x):
        out = (
            F.layer_norm(x.float(), self.normalized_shape) * self.weight.float() + self.bias.float()
        )
        return out.to(self.weight.dtype)


def turn(x, positions):
    half = x.size(-1) // 2
    angles = positions.float()[..., None, None] * 100.0 ** (-torch.arange(half) / half)
    a, b = x.float().chunk(2, -1)
    turned = torch.cat(
        [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1
    )
    return turned.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.dim // c.num_heads
        self.q, self.k, self.v, self.out = (nn.Linear(c.dim, c.dim, bias=False) for _ in range(4))
        self.core = Core()

    def forward(self, x, positions):
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.q, self.k, self.v))
        return self.out(self.core(turn(q, positions), turn(k, positions), v).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.up, self.down = nn.Linear(c.dim, 2 * c.dim), nn.Linear(2 * c.dim, c.dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn_norm, self.attn = Norm(c.dim), Attention(c)
        self.ffn_norm, self.ffn = Norm(c.dim), FeedForward(c)

    def forward(self, x, positions):
        x = x + self.attn(self.attn_norm(x), positions).float()
        return x + self.ffn(self.ffn_norm(x)).float()


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.blocks = nn.ModuleDict({str(i): Block(c) for i in range(c.num_layers)})
        self.norm = Norm(c.dim)
        self.head = nn.Linear(c.dim, c.vocab_size, bias=False)

    def forward(self, tokens, positions):
        x = self.embed(tokens).float()
        for block in self.blocks.values():
            x = block(x, positions)
        return self.head(self.norm(x))


def initial(c):
    return {
        "*norm.weight": Draw("ones"),
        "*norm.bias": Draw("zeros"),
        "blocks.*.*norm.weight": Draw("ones"),
        "blocks.*.*norm.bias": Draw("zeros"),
        "*.weight": Draw("normal", std=0.02),
        "blocks.*.*.*.bias": Draw("zeros"),
        "blocks.*.*.*.weight": Draw("normal", std=0.02),
    }
