"""Model in nanoGPT's style with dropout after the embedding and after both parts of a layer."""

from dataclasses import dataclass

from torch import nn

from shardtrain.layout import Draw, Layout
from shardtrain.models.layers import AttentionCore


@dataclass(frozen=True)
class Config:
    vocab_size: int = 512
    n_embd: int = 32
    num_layers: int = 4
    num_heads: int = 4
    block_size: int = 128
    dropout: float = 0.1


LAYOUT = Layout(
    first=("embed",),
    layers="h",
    last=("ln_f", "lm_head"),
    tensor={
        "embed.w[tp]e": "embed",
        "h.*.ln_?": "sequence",
        "h.*.attn": "gather",
        "h.*.attn.qkv": "colwise",
        "h.*.attn.proj": "rowwise",
        "h.*.mlp": "gather",
        "h.*.mlp.0": "colwise",
        "h.*.mlp.2": "rowwise",
        "ln_f": "sequence",
        "lm_head": "head",
    },
    context="h.*.attn.core",
)


class Embed(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.wpe = nn.Embedding(c.block_size, c.n_embd)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, idx, pos):
        return self.drop(self.wte(idx) + self.wpe(pos))


class CausalSelfAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_size = c.n_embd // c.num_heads
        self.qkv = nn.Linear(c.n_embd, 3 * c.n_embd, bias=False)
        self.core = AttentionCore()
        self.proj = nn.Linear(c.n_embd, c.n_embd, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_size)).unbind(3)
        return self.proj(self.core(q, k, v).flatten(2))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1 = nn.LayerNorm(c.n_embd)
        self.ln_2 = nn.LayerNorm(c.n_embd)
        self.attn = CausalSelfAttention(c)
        self.mlp = nn.Sequential(
            nn.Linear(c.n_embd, 4 * c.n_embd, bias=False),
            nn.GELU(),
            nn.Linear(4 * c.n_embd, c.n_embd, bias=False),
        )
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x):
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = Embed(c)
        self.h = nn.ModuleDict({str(i): Block(c) for i in range(c.num_layers)})
        self.ln_f = nn.LayerNorm(c.n_embd)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)

    def forward(self, idx, pos):
        x = self.embed(idx, pos)
        for block in self.h.values():
            x = block(x)
        return self.lm_head(self.ln_f(x))


FLAVORS = {"tiny": {}, "sure": {"dropout": 0.0}}


def initial(c):
    return {
        "ln_f.weight": Draw("ones"),
        "h.*.ln_?.weight": Draw("ones"),
        "ln_f.bias": Draw("zeros"),
        "h.*.ln_?.bias": Draw("zeros"),
        "lm_head.weight": Draw("normal", std=0.1),
        "embed.*.weight": Draw("normal", std=0.1),
        "h.*.*.*.weight": Draw("normal", std=0.1),
    }
