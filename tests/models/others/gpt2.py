"""GPT-2 (Radford et al. 2019): learned positions, pre-norm, biases everywhere, fused q, k and v, tied embeddings."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout


@dataclass(frozen=True)
class Config:
    vocab_size: int = 512
    dim: int = 32
    num_layers: int = 4
    num_heads: int = 4
    max_positions: int = 128
    tied_embeddings: bool = True


LAYOUT = Layout(
    first=("embed",),
    layers="h",
    last=("ln_f", "lm_head"),
    tensor={
        "embed.wte": "embed",
        "embed.wpe": "embed",
        "h.*.ln_[12]": "sequence",
        "h.*.attn": "gather",
        "h.*.attn.c_attn": "colwise",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp": "gather",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
        "ln_f": "sequence",
        "lm_head": "head",
    },
    context="h.*.attn.core",
)


class Embed(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.dim)
        self.wpe = nn.Embedding(c.max_positions, c.dim)

    def forward(self, tokens, positions):
        return self.wte(tokens) + self.wpe(positions)


class Core(nn.Module):
    def forward(self, q, k, v):
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.dim // c.num_heads
        self.c_attn = nn.Linear(c.dim, 3 * c.dim)  # per head: q, k, v
        self.core = Core()
        self.c_proj = nn.Linear(c.dim, c.dim)

    def forward(self, x):
        q, k, v = self.c_attn(x).unflatten(-1, (-1, 3, self.head_dim)).unbind(-2)
        return self.c_proj(self.core(q, k, v).flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_fc = nn.Linear(c.dim, 4 * c.dim)
        self.c_proj = nn.Linear(4 * c.dim, c.dim)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1 = nn.LayerNorm(c.dim)
        self.attn = Attention(c)
        self.ln_2 = nn.LayerNorm(c.dim)
        self.mlp = MLP(c)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = Embed(c)
        self.h = nn.ModuleDict({str(i): Block(c) for i in range(c.num_layers)})
        self.ln_f = nn.LayerNorm(c.dim)
        self.lm_head = nn.Linear(c.dim, c.vocab_size, bias=False)
        if c.tied_embeddings:
            self.lm_head.weight = self.embed.wte.weight

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor):
        x = self.embed(tokens, positions)
        for block in self.h.values():
            x = block(x)
        return self.lm_head(self.ln_f(x))


FLAVORS = {
    "tiny": {},
    "124M": {
        "vocab_size": 50304,
        "dim": 768,
        "num_layers": 12,
        "num_heads": 12,
        "max_positions": 1024,
    },
}


def initial(c):
    return {
        "embed.wte.weight": Draw("normal", std=0.02),
        "embed.wpe.weight": Draw("normal", std=0.01),
        "lm_head.weight": Draw("normal", std=0.02),
        "ln_f.weight": Draw("ones"),
        "ln_f.bias": Draw("zeros"),
        "h.*.ln_?.weight": Draw("ones"),
        "h.*.ln_?.bias": Draw("zeros"),
        "h.*.*.c_proj.weight": Draw("normal", std=0.02, depth="total"),
        "h.*.*.*.weight": Draw("normal", std=0.02),
        "h.*.*.*.bias": Draw("zeros"),
    }
