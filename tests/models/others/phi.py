"""Phi 2 (2023): parallel attention and feed-forward, rotary angles on half of a head, biases everywhere."""

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
    partial_rotary_factor: float = 0.5
    intermediate_size: int = 128


LAYOUT = Layout(
    first=("embed_tokens",),
    layers="layers",
    last=("final_layernorm", "lm_head"),
    tensor={
        "embed_tokens": "embed",
        "layers.*.input_layernorm": "sequence",
        "layers.*.self_attn": "gather",
        "layers.*.self_attn.[qkv]_proj": "colwise",
        "layers.*.self_attn.dense": "rowwise",
        "layers.*.mlp": "gather",
        "layers.*.mlp.fc1": "colwise",
        "layers.*.mlp.fc2": "rowwise",
        "final_layernorm": "sequence",
        "lm_head": "head",
    },
    context="layers.*.self_attn.core",
)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.dim // c.num_heads
        self.rotary_dim = int(c.partial_rotary_factor * self.head_dim)
        self.q_proj = nn.Linear(c.dim, c.dim)
        self.k_proj = nn.Linear(c.dim, c.dim)
        self.v_proj = nn.Linear(c.dim, c.dim)
        self.dense = nn.Linear(c.dim, c.dim)
        self.core = AttentionCore()

    def forward(self, x, angles, documents):
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        r = self.rotary_dim
        q = torch.cat([rotate(q[..., :r], angles), q[..., r:]], -1)
        k = torch.cat([rotate(k[..., :r], angles), k[..., r:]], -1)
        return self.dense(self.core(q, k, v, documents).flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.fc1 = nn.Linear(c.dim, c.intermediate_size)
        self.fc2 = nn.Linear(c.intermediate_size, c.dim)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(c.dim)
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.resid_dropout = nn.Dropout(0.0)

    def forward(self, x, angles, documents):
        h = self.input_layernorm(x)
        return (
            self.resid_dropout(self.self_attn(h, angles, documents))
            + self.resid_dropout(self.mlp(h))
            + x
        )


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.dim)
        self.rotary = RotaryAngles(int(c.partial_rotary_factor * (c.dim // c.num_heads)), 10000.0)
        self.layers = nn.ModuleDict({str(i): Layer(c) for i in range(c.num_layers)})
        self.final_layernorm = nn.LayerNorm(c.dim)
        self.lm_head = nn.Linear(c.dim, c.vocab_size, bias=True)

    def forward(self, tokens, positions, documents_BT=None):
        x = self.embed_tokens(tokens)
        angles = self.rotary(positions)
        for layer in self.layers.values():
            x = layer(x, angles, documents_BT)
        return self.lm_head(self.final_layernorm(x))


def initial(c):
    return {
        "final_layernorm.weight": Draw("ones"),
        "layers.*.input_layernorm.weight": Draw("ones"),
        "*.bias": Draw("zeros"),
        "layers.*.input_layernorm.bias": Draw("zeros"),
        "layers.*.*.*.bias": Draw("zeros"),
        "*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.weight": Draw("normal", std=0.1),
    }
