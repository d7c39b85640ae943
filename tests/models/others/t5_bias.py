"""Decoder with T5's learned distance bias (Raffel et al. 2020) per layer, passed to the core."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout


@dataclass(frozen=True)
class Config:
    vocab_size: int = 512
    d_model: int = 32
    num_layers: int = 4
    num_heads: int = 4
    num_buckets: int = 12


LAYOUT = Layout(
    first=("shared",),
    layers="block",
    last=("final_layer_norm", "lm_head"),
    tensor={
        "shared": "embed",
        "block.*.norm?": "sequence",
        "block.*.attn": "gather",
        "block.*.attn.[qkv]": "colwise",
        "block.*.attn.relative_attention_bias": "colwise",
        "block.*.attn.o": "rowwise",
        "block.*.wi": "colwise",
        "block.*.wo": "rowwise",
        "final_layer_norm": "sequence",
        "lm_head": "head",
    },
    context="block.*.attn.core",
)


class Core(nn.Module):
    def forward(self, q, k, v, bias):
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        hidden = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).triu(1)
        bias = bias.masked_fill(hidden, -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.d_model // c.num_heads
        self.num_buckets = c.num_buckets
        self.q = nn.Linear(c.d_model, c.d_model, bias=False)
        self.k = nn.Linear(c.d_model, c.d_model, bias=False)
        self.v = nn.Linear(c.d_model, c.d_model, bias=False)
        self.o = nn.Linear(c.d_model, c.d_model, bias=False)
        self.relative_attention_bias = nn.Embedding(c.num_buckets, c.num_heads)
        self.core = Core()

    def forward(self, x, positions):
        q = self.q(x).unflatten(-1, (-1, self.head_dim))
        k = self.k(x).unflatten(-1, (-1, self.head_dim))
        v = self.v(x).unflatten(-1, (-1, self.head_dim))
        distance = (positions[:, :, None] - positions[:, None]).clamp(min=0)
        far_bucket = 4 + (distance.float().clamp(min=4) / 4).log2().mul(2).long()
        bucket = torch.where(distance < 4, distance, far_bucket).clamp(max=self.num_buckets - 1)
        bias = self.relative_attention_bias(bucket).permute(0, 3, 1, 2)
        return self.o(self.core(q, k, v, bias).flatten(2))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1 = nn.RMSNorm(c.d_model, eps=1e-6)
        self.norm2 = nn.RMSNorm(c.d_model, eps=1e-6)
        self.attn = Attention(c)
        self.wi = nn.Linear(c.d_model, 4 * c.d_model, bias=False)
        self.wo = nn.Linear(4 * c.d_model, c.d_model, bias=False)

    def forward(self, x, positions):
        x = x + self.attn(self.norm1(x), positions)
        return x + self.wo(F.relu(self.wi(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.shared = nn.Embedding(c.vocab_size, c.d_model)
        self.block = nn.ModuleDict({str(i): Block(c) for i in range(c.num_layers)})
        self.final_layer_norm = nn.RMSNorm(c.d_model, eps=1e-6)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, positions):
        x = self.shared(tokens)
        for block in self.block.values():
            x = block(x, positions)
        return self.lm_head(self.final_layer_norm(x))


FLAVORS = {"tiny": {}}


def initial(c):
    return {
        "final_layer_norm.weight": Draw("ones"),
        "block.*.norm?.weight": Draw("ones"),
        "*.weight": Draw("normal", std=0.1),
        "block.*.*.weight": Draw("normal", std=0.1),
        "block.*.attn.relative_attention_bias.weight": Draw("normal", std=0.5),
        "block.*.attn.*.weight": Draw("normal", std=0.1),
    }
