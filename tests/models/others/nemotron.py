"""Nemotron (2024): LayerNorm with 1 + weight, squared ReLU, rotary angles on half of a head."""

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
    num_kv_heads: int = 2
    ffn_dim: int = 96


LAYOUT = Layout(
    first=("embed",),
    layers="layers",
    last=("norm", "head"),
    tensor={
        "embed": "embed",
        "layers.*.*_norm": "sequence",
        "layers.*.attn": "gather",
        "layers.*.attn.w[qkv]": "colwise",
        "layers.*.attn.wo": "rowwise",
        "layers.*.mlp.up": "colwise",
        "layers.*.mlp.down": "rowwise",
        "norm": "sequence",
        "head": "head",
    },
    context="layers.*.attn.core",
)


class LayerNorm1P(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.hd = c.dim // c.num_heads
        self.wq = nn.Linear(c.dim, c.dim, bias=False)
        self.wk = nn.Linear(c.dim, c.num_kv_heads * self.hd, bias=False)
        self.wv = nn.Linear(c.dim, c.num_kv_heads * self.hd, bias=False)
        self.wo = nn.Linear(c.dim, c.dim, bias=False)
        self.core = AttentionCore()

    def forward(self, x, angles):
        q = self.wq(x)
        k = self.wk(x)
        v = self.wv(x)
        B, T, _ = q.shape
        q = q.view(B, T, -1, self.hd)
        k = k.view(B, T, -1, self.hd)
        v = v.view(B, T, -1, self.hd)
        half = self.hd // 2
        q = torch.cat((rotate(q[..., :half], angles), q[..., half:]), dim=-1)
        k = torch.cat((rotate(k[..., :half], angles), k[..., half:]), dim=-1)
        return self.wo(self.core(q, k, v).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.up = nn.Linear(c.dim, c.ffn_dim, bias=False)
        self.down = nn.Linear(c.ffn_dim, c.dim, bias=False)

    def forward(self, x):
        return self.down(F.relu(self.up(x)).pow(2))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn_norm = LayerNorm1P(c.dim)
        self.mlp_norm = LayerNorm1P(c.dim)
        self.attn = Attention(c)
        self.mlp = MLP(c)

    def forward(self, x, angles):
        x = x + self.attn(self.attn_norm(x), angles)
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.rope = RotaryAngles(c.dim // c.num_heads // 2, 10000.0)
        self.layers = nn.ModuleDict({str(i): Layer(c) for i in range(c.num_layers)})
        self.norm = LayerNorm1P(c.dim)
        self.head = nn.Linear(c.dim, c.vocab_size, bias=False)

    def forward(self, tokens, positions):
        x = self.embed(tokens)
        angles = self.rope(positions)
        for layer in self.layers.values():
            x = layer(x, angles)
        return self.head(self.norm(x))


def initial(c):
    return {
        "norm.*": Draw("zeros"),
        "layers.*.*_norm.*": Draw("zeros"),
        "*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.weight": Draw("normal", std=0.1, depth="total"),
    }
