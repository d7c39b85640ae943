"""BLOOM (BigScience 2022): ALiBi, a norm after the embedding, fused q, k and v per head, biases."""

from dataclasses import dataclass

from torch import nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout
from shardtrain.models.layers import AttentionCore


@dataclass(frozen=True)
class Config:
    vocab_size: int = 512
    dim: int = 32
    num_layers: int = 4
    num_heads: int = 4


LAYOUT = Layout(
    first=("word_embeddings", "word_embeddings_layernorm"),
    layers="h",
    last=("ln_f", "lm_head"),
    tensor={
        "word_embeddings": "embed",
        "word_embeddings_layernorm": "sequence",
        "h.*.*_layernorm": "sequence",
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
        self.head_dim = c.dim // c.num_heads
        self.query_key_value = nn.Linear(c.dim, 3 * c.dim)
        slopes = [2.0 ** (-8.0 * (i + 1) / c.num_heads) for i in range(c.num_heads)]
        self.core = AttentionCore(alibi_slopes=slopes)
        self.dense = nn.Linear(c.dim, c.dim)

    def forward(self, x, documents_BT):
        q, k, v = self.query_key_value(x).unflatten(-1, (-1, 3, self.head_dim)).unbind(-2)
        return self.dense(self.core(q, k, v, documents_BT).flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(c.dim, 4 * c.dim)
        self.dense_4h_to_h = nn.Linear(4 * c.dim, c.dim)

    def forward(self, x):
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(c.dim)
        self.post_attention_layernorm = nn.LayerNorm(c.dim)
        self.self_attention = Attention(c)
        self.mlp = MLP(c)

    def forward(self, x, documents_BT=None):
        x = x + self.self_attention(self.input_layernorm(x), documents_BT)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab_size, c.dim)
        self.word_embeddings_layernorm = nn.LayerNorm(c.dim)
        self.h = nn.ModuleDict({str(i): Block(c) for i in range(c.num_layers)})
        self.ln_f = nn.LayerNorm(c.dim)
        self.lm_head = nn.Linear(c.dim, c.vocab_size, bias=False)

    def forward(self, input_ids, positions, documents_BT=None):
        x = self.word_embeddings_layernorm(self.word_embeddings(input_ids))
        for block in self.h.values():
            x = block(x, documents_BT)
        return self.lm_head(self.ln_f(x))


FLAVORS = {"tiny": {}}


def initial(c):
    linear = Draw("normal", std=0.1)
    return {
        "word_embeddings.weight": Draw("normal", std=0.5),
        "lm_head.weight": linear,
        "word_embeddings_layernorm.weight": Draw("ones"),
        "ln_f.weight": Draw("ones"),
        "h.*.*_layernorm.weight": Draw("ones"),
        "h.*.*.*.weight": linear,
        "*.bias": Draw("zeros"),
        "h.*.*_layernorm.bias": Draw("zeros"),
        "h.*.*.*.bias": Draw("uniform", std=0.1),
    }
