"""A causal BERT (Devlin et al. 2018): post-norm, token types, and norms after the embedding and in the head."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from shardtrain.layout import Draw, Layout


@dataclass(frozen=True)
class Config:
    vocab_size: int = 512
    hidden_size: int = 32
    intermediate_size: int = 64
    num_layers: int = 4
    num_heads: int = 4
    max_position_embeddings: int = 128
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12


LAYOUT = Layout(
    first=("embeddings",),
    layers="layer",
    last=("transform", "decoder"),
    tensor={
        "embeddings.*_embeddings": "embed",
        "embeddings.norm": "sequence",
        "layer.*.attention": "gather",
        "layer.*.attention.query": "colwise",
        "layer.*.attention.key": "colwise",
        "layer.*.attention.value": "colwise",
        "layer.*.attention.dense": "rowwise",
        "layer.*.attention_norm": "sequence",
        "layer.*.mlp": "gather",
        "layer.*.mlp.0": "colwise",
        "layer.*.mlp.2": "rowwise",
        "layer.*.output_norm": "sequence",
        "transform.dense": "router",
        "transform.norm": "sequence",
        "decoder": "head",
    },
    context="layer.*.attention.core",
)


class Embeddings(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab_size, c.hidden_size)
        self.position_embeddings = nn.Embedding(c.max_position_embeddings, c.hidden_size)
        self.token_type_embeddings = nn.Embedding(c.type_vocab_size, c.hidden_size)
        self.norm = nn.LayerNorm(c.hidden_size, eps=c.layer_norm_eps)

    def forward(self, input_ids, position_ids):
        types = self.token_type_embeddings(torch.zeros_like(input_ids))
        return self.norm(
            self.word_embeddings(input_ids) + types + self.position_embeddings(position_ids)
        )


class Core(nn.Module):
    def forward(self, q, k, v):
        scores = torch.einsum("bqnh,bknh->bnqk", q, k) / q.size(-1) ** 0.5
        hidden = torch.ones(q.size(1), k.size(1), dtype=torch.bool, device=q.device).triu(1)
        return torch.einsum(
            "bnqk,bknh->bqnh", scores.masked_fill(hidden, float("-inf")).softmax(-1), v
        )


class SelfAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.size = c.hidden_size // c.num_heads
        self.query = nn.Linear(c.hidden_size, c.hidden_size)
        self.key = nn.Linear(c.hidden_size, c.hidden_size)
        self.value = nn.Linear(c.hidden_size, c.hidden_size)
        self.core = Core()
        self.dense = nn.Linear(c.hidden_size, c.hidden_size)

    def forward(self, x):
        q = self.query(x).unflatten(-1, (-1, self.size))
        k = self.key(x).unflatten(-1, (-1, self.size))
        v = self.value(x).unflatten(-1, (-1, self.size))
        return self.dense(self.core(q, k, v).flatten(-2))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention = SelfAttention(c)
        self.attention_norm = nn.LayerNorm(c.hidden_size, eps=c.layer_norm_eps)
        self.mlp = nn.Sequential(
            nn.Linear(c.hidden_size, c.intermediate_size),
            nn.GELU(),
            nn.Linear(c.intermediate_size, c.hidden_size),
        )
        self.output_norm = nn.LayerNorm(c.hidden_size, eps=c.layer_norm_eps)

    def forward(self, x):
        x = self.attention_norm(x + self.attention(x))
        return self.output_norm(x + self.mlp(x))


class Transform(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.dense = nn.Linear(c.hidden_size, c.hidden_size)
        self.norm = nn.LayerNorm(c.hidden_size, eps=c.layer_norm_eps)

    def forward(self, x):
        return self.norm(F.gelu(self.dense(x)))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embeddings = Embeddings(c)
        self.layer = nn.ModuleDict({str(i): Layer(c) for i in range(c.num_layers)})
        self.transform = Transform(c)
        self.decoder = nn.Linear(c.hidden_size, c.vocab_size)

    def forward(self, input_ids, position_ids):
        x = self.embeddings(input_ids, position_ids)
        for layer in self.layer.values():
            x = layer(x)
        return self.decoder(self.transform(x))


FLAVORS = {"tiny": {}}


def initial(c):
    weights = ("decoder", "transform.dense", "embeddings.*", "layer.*.attention.*", "layer.*.mlp.?")
    norms = ("embeddings.norm", "transform.norm", "layer.*.*_norm")
    return {
        **{f"{name}.weight": Draw("ones") for name in norms},
        **{f"{name}.weight": Draw("normal", std=0.05) for name in weights},
        **{f"{name}.bias": Draw("zeros") for name in (*weights, *norms)},
    }
