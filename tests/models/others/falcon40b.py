"""Falcon 40B (2023): parallel layers with separate norms, fused queries, key and value per group, tied embeddings."""

from dataclasses import dataclass

from torch import nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout
from shardtrain.models.layers import AttentionCore, RotaryAngles, rotate

FLAVORS = {"tiny": {}}


@dataclass(frozen=True)
class Config:
    vocab_size: int = 512
    hidden_size: int = 32
    num_layers: int = 4
    num_attention_heads: int = 8
    num_kv_heads: int = 2


LAYOUT = Layout(
    first=("word_embeddings",),
    layers="h",
    last=("ln_f", "lm_head"),
    tensor={
        "word_embeddings": "embed",
        "h.*.ln_*": "sequence",
        "h.*.self_attention": "gather",
        "h.*.self_attention.query_key_value": "colwise",
        "h.*.self_attention.dense": "rowwise",
        "h.*.mlp": "gather",
        "h.*.mlp.dense_h_to_4h": "colwise",
        "h.*.mlp.dense_4h_to_h": "rowwise",
        "ln_f": "sequence",
        "lm_head": "head",
    },
    context="h.*.self_attention.core",
)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.hidden_size // c.num_attention_heads
        self.group = c.num_attention_heads // c.num_kv_heads
        self.query_key_value = nn.Linear(
            c.hidden_size, (c.num_attention_heads + 2 * c.num_kv_heads) * self.head_dim, bias=False
        )
        self.dense = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.core = AttentionCore()

    def forward(self, x, angles):
        # for each KV head: queries, key, value
        qkv = self.query_key_value(x).unflatten(-1, (-1, self.group + 2, self.head_dim))
        q = qkv[..., :-2, :].flatten(2, 3)
        k = qkv[..., -2, :]
        v = qkv[..., -1, :]
        out = self.core(rotate(q, angles), rotate(k, angles), v)
        return self.dense(out.flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(c.hidden_size, 4 * c.hidden_size, bias=False)
        self.dense_4h_to_h = nn.Linear(4 * c.hidden_size, c.hidden_size, bias=False)

    def forward(self, x):
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x)))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_attn = nn.LayerNorm(c.hidden_size)
        self.ln_mlp = nn.LayerNorm(c.hidden_size)
        self.self_attention = Attention(c)
        self.mlp = MLP(c)

    def forward(self, x, angles):
        attn = self.self_attention(self.ln_attn(x), angles)
        mlp = self.mlp(self.ln_mlp(x))
        mlp = mlp + attn
        return x + mlp


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab_size, c.hidden_size)
        self.rotary = RotaryAngles(c.hidden_size // c.num_attention_heads, 10000.0)
        self.h = nn.ModuleDict({str(i): Block(c) for i in range(c.num_layers)})
        self.ln_f = nn.LayerNorm(c.hidden_size)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.lm_head.weight = self.word_embeddings.weight

    def forward(self, tokens, positions):
        x = self.word_embeddings(tokens)
        angles = self.rotary(positions)
        for block in self.h.values():
            x = block(x, angles)
        return self.lm_head(self.ln_f(x))


def initial(c):
    return {
        "ln_f.weight": Draw("ones"),
        "h.*.ln_*.weight": Draw("ones"),
        "*.bias": Draw("zeros"),
        "h.*.ln_*.bias": Draw("zeros"),
        "*.weight": Draw("normal", std=0.05),
        "h.*.*.*.weight": Draw("normal", std=0.1),
    }
