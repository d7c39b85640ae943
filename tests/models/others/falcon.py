"""Falcon 7B (Penedo et al. 2023): one key-value head for all queries, parallel attention and feed-forward."""

from dataclasses import dataclass

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
    num_kv_heads: int = 1


LAYOUT = Layout(
    first=("word_embeddings",),
    layers="h",
    last=("ln_f", "lm_head"),
    tensor={
        "word_embeddings": "embed",
        "h.*.ln": "sequence",
        "h.*.attn": "gather",
        "h.*.attn.[qkv]": "colwise",
        "h.*.attn.dense": "rowwise",
        "h.*.mlp": "gather",
        "h.*.mlp.up": "colwise",
        "h.*.mlp.down": "rowwise",
        "ln_f": "sequence",
        "lm_head": "head",
    },
    context="h.*.attn.core",
)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.dim // c.num_heads
        self.q = nn.Linear(c.dim, c.dim, bias=False)
        self.k = nn.Linear(c.dim, c.num_kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(c.dim, c.num_kv_heads * self.head_dim, bias=False)
        self.core = AttentionCore()
        self.dense = nn.Linear(c.dim, c.dim, bias=False)

    def forward(self, x, angles):
        q = self.q(x).unflatten(-1, (-1, self.head_dim))
        k = self.k(x).unflatten(-1, (-1, self.head_dim))
        v = self.v(x).unflatten(-1, (-1, self.head_dim))
        out = self.core(rotate(q, angles), rotate(k, angles), v)
        return self.dense(out.flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.up = nn.Linear(c.dim, 4 * c.dim, bias=False)
        self.down = nn.Linear(4 * c.dim, c.dim, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln = nn.LayerNorm(c.dim)
        self.attn = Attention(c)
        self.mlp = MLP(c)

    def forward(self, x, angles):
        normed = self.ln(x)
        return self.attn(normed, angles) + self.mlp(normed) + x


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab_size, c.dim)
        self.rotary = RotaryAngles(c.dim // c.num_heads, 10000.0)
        self.h = nn.ModuleDict({str(i): Block(c) for i in range(c.num_layers)})
        self.ln_f = nn.LayerNorm(c.dim)
        self.lm_head = nn.Linear(c.dim, c.vocab_size, bias=False)

    def forward(self, tokens, positions):
        x = self.word_embeddings(tokens)
        angles = self.rotary(positions)
        for block in self.h.values():
            x = block(x, angles)
        return self.lm_head(self.ln_f(x))


FLAVORS = {"tiny": {}}


def initial(c):
    return {
        "ln_f.weight": Draw("ones"),
        "h.*.ln.weight": Draw("ones"),
        "*.bias": Draw("zeros"),
        "h.*.ln.bias": Draw("zeros"),
        "*.weight": Draw("normal", std=0.1),
        "h.*.*.*.weight": Draw("normal", std=0.1),
    }
