"""NanoGPT speedruns: norms without weights, ReLU squared, norms of queries and keys, soft-capped logits."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout
from shardtrain.models.layers import AttentionCore, RotaryAngles, rotate


@dataclass(frozen=True)
class Config:
    vocab_size: int = 512
    dim: int = 32
    num_layers: int = 4
    num_heads: int = 4


LAYOUT = Layout(
    first=("embed",),
    layers="blocks",
    last=("head",),
    tensor={
        "embed.table": "embed",
        "blocks.*.attn.w[qkv]": "colwise",
        "blocks.*.attn.wo": "rowwise",
        "blocks.*.mlp.up": "colwise",
        "blocks.*.mlp.down": "rowwise",
        "head.out": "head",
    },
    context="blocks.*.attn.core",
)


def norm(x):
    return F.rms_norm(x, (x.size(-1),), eps=1e-6)


class Embed(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.table = nn.Embedding(c.vocab_size, c.dim)

    def forward(self, tokens):
        return norm(self.table(tokens))


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.dim // c.num_heads
        self.wq = nn.Linear(c.dim, c.dim, bias=False)
        self.wk = nn.Linear(c.dim, c.dim, bias=False)
        self.wv = nn.Linear(c.dim, c.dim, bias=False)
        self.wo = nn.Linear(c.dim, c.dim, bias=False)
        self.core = AttentionCore(scale=0.12 * 8)

    def forward(self, x, angles):
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))
        k = self.wk(x).unflatten(-1, (-1, self.head_dim))
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        out = self.core(rotate(norm(q), angles), rotate(norm(k), angles), v)
        return self.wo(out.flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.up = nn.Linear(c.dim, 4 * c.dim, bias=False)
        self.down = nn.Linear(4 * c.dim, c.dim, bias=False)

    def forward(self, x):
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn = Attention(c)
        self.mlp = MLP(c)

    def forward(self, x, angles):
        x = x + self.attn(norm(x), angles)
        return x + self.mlp(norm(x))


class Head(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.out = nn.Linear(c.dim, c.vocab_size, bias=False)

    def forward(self, x):
        return 15.0 * torch.tanh(self.out(norm(x)) / 15.0)


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = Embed(c)
        self.rope = RotaryAngles(c.dim // c.num_heads, 1024.0)
        self.blocks = nn.ModuleDict({str(i): Block(c) for i in range(c.num_layers)})
        self.head = Head(c)

    def forward(self, tokens, positions):
        x = self.embed(tokens)
        angles = self.rope(positions)
        for block in self.blocks.values():
            x = block(x, angles)
        return self.head(x)


FLAVORS = {"tiny": {}}


def initial(c):
    return {
        "embed.table.weight": Draw("normal"),
        "head.out.weight": Draw("normal", std=0.2),
        "blocks.*.*.w[qkv].weight": Draw("normal", std=0.2),
        "blocks.*.*.*.weight": Draw("uniform", std=0.2),
    }
