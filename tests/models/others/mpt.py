"""MPT (MosaicML 2023): ALiBi in its own attention core, no biases, LayerNorm without bias, wide GELU."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from shardtrain.layout import Draw, Layout


@dataclass(frozen=True)
class Config:
    vocab_size: int = 512
    d_model: int = 32
    num_layers: int = 4
    num_heads: int = 4
    alibi_bias_max: int = 8


LAYOUT = Layout(
    first=("wte",),
    layers="blocks",
    last=("norm_f", "lm_head"),
    tensor={
        "wte": "embed",
        "blocks.*.norm_[12]": "sequence",
        "blocks.*.attn": "gather",
        "blocks.*.attn.w[qkv]": "colwise",
        "blocks.*.attn.out_proj": "rowwise",
        "blocks.*.up_proj": "colwise",
        "blocks.*.down_proj": "rowwise",
        "norm_f": "sequence",
        "lm_head": "head",
    },
    context="blocks.*.attn.core",
)


class AlibiCore(nn.Module):
    """Causal attention with a bias per head. The slopes are those of the heads of this rank."""

    def __init__(self, num_heads, bias_max):
        super().__init__()
        self.alibi_slopes = tuple(
            2.0 ** (-bias_max * (i + 1) / num_heads) for i in range(num_heads)
        )

    def forward(self, q, k, v, documents=None):
        scores = torch.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(q.size(-1))
        place = torch.arange(q.size(1), device=q.device)
        slopes = torch.tensor(self.alibi_slopes, device=q.device, dtype=scores.dtype)
        scores = scores + slopes[:, None, None] * (place - place[-1])
        visible = (place[:, None] >= place)[None]
        if documents is not None:
            visible = visible & (documents[:, :, None] == documents[:, None])
        return torch.einsum(
            "bnts,bsnh->btnh", scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1), v
        )


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.d_model // c.num_heads
        self.wq = nn.Linear(c.d_model, c.d_model, bias=False)
        self.wk = nn.Linear(c.d_model, c.d_model, bias=False)
        self.wv = nn.Linear(c.d_model, c.d_model, bias=False)
        self.core = AlibiCore(c.num_heads, c.alibi_bias_max)
        self.out_proj = nn.Linear(c.d_model, c.d_model, bias=False)

    def forward(self, x, documents):
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))
        k = self.wk(x).unflatten(-1, (-1, self.head_dim))
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        return self.out_proj(self.core(q, k, v, documents).flatten(2))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm_1 = nn.LayerNorm(c.d_model, bias=False)
        self.norm_2 = nn.LayerNorm(c.d_model, bias=False)
        self.attn = Attention(c)
        self.up_proj = nn.Linear(c.d_model, 4 * c.d_model, bias=False)
        self.act = nn.GELU()
        self.down_proj = nn.Linear(4 * c.d_model, c.d_model, bias=False)

    def forward(self, x, documents):
        x = x + self.attn(self.norm_1(x), documents)
        return x + self.down_proj(self.act(self.up_proj(self.norm_2(x))))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleDict({str(i): Block(c) for i in range(c.num_layers)})
        self.norm_f = nn.LayerNorm(c.d_model, bias=False)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, positions, documents_BT=None):
        x = self.wte(tokens)
        for block in self.blocks.values():
            x = block(x, documents_BT)
        return self.lm_head(self.norm_f(x))


FLAVORS = {"tiny": {}}


def initial(c):
    return {
        "norm_f.weight": Draw("ones"),
        "blocks.*.norm_?.weight": Draw("ones"),
        "*.weight": Draw("normal", std=0.1),
        "blocks.*.*.weight": Draw("normal", std=0.1),
        "blocks.*.*.*.weight": Draw("normal", std=0.1),
    }
