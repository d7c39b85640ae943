"""OPT (Zhang et al. 2022): learned positions that start at row 2, ReLU, separate q, k and v with biases."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout
from shardtrain.models.layers import AttentionCore

OFFSET = 2


@dataclass(frozen=True)
class Config:
    vocab_size: int = 512
    dim: int = 32
    ffn_dim: int = 128
    num_layers: int = 4
    num_heads: int = 4
    max_positions: int = 127  # 129 rows with the offset: odd, so ranks get uneven shards


LAYOUT = Layout(
    first=("embeddings",),
    layers="layers",
    last=("final_layer_norm", "lm_head"),
    tensor={
        "embeddings.tokens": "embed",
        "embeddings.positions": "embed",
        "layers.*.self_attn_layer_norm": "sequence",
        "layers.*.self_attn": "gather",
        "layers.*.self_attn.[qkv]_proj": "colwise",
        "layers.*.self_attn.out_proj": "rowwise",
        "layers.*.final_layer_norm": "sequence",
        "layers.*.fc1": "colwise",
        "layers.*.fc2": "rowwise",
        "final_layer_norm": "sequence",
        "lm_head": "head",
    },
    context="layers.*.self_attn.core",
)


class Embeddings(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(c.vocab_size, c.dim)
        self.positions = nn.Embedding(c.max_positions + OFFSET, c.dim)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions(positions + OFFSET)


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.head_dim = c.dim // c.num_heads
        self.q_proj = nn.Linear(c.dim, c.dim)
        self.k_proj = nn.Linear(c.dim, c.dim)
        self.v_proj = nn.Linear(c.dim, c.dim)
        self.core = AttentionCore(scale=1.0)
        self.out_proj = nn.Linear(c.dim, c.dim)

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        shape = (-1, self.head_dim)
        # OPT scales queries instead of scores, like fairseq
        q = (self.q_proj(x) * self.head_dim**-0.5).unflatten(-1, shape)
        k = self.k_proj(x).unflatten(-1, shape)
        v = self.v_proj(x).unflatten(-1, shape)
        return self.out_proj(self.core(q, k, v, documents).flatten(2))


class Layer(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.self_attn_layer_norm = nn.LayerNorm(c.dim)
        self.self_attn = Attention(c)
        self.final_layer_norm = nn.LayerNorm(c.dim)
        self.fc1 = nn.Linear(c.dim, c.ffn_dim)
        self.fc2 = nn.Linear(c.ffn_dim, c.dim)

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x), documents)
        return x + self.fc2(F.relu(self.fc1(self.final_layer_norm(x))))


class Model(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embeddings = Embeddings(c)
        self.layers = nn.ModuleDict({str(i): Layer(c) for i in range(c.num_layers)})
        self.final_layer_norm = nn.LayerNorm(c.dim)
        self.lm_head = nn.Linear(c.dim, c.vocab_size, bias=False)

    def forward(
        self, tokens_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor | None = None
    ) -> Tensor:
        x = self.embeddings(tokens_BT, positions_BT)
        for layer in self.layers.values():
            x = layer(x, documents_BT)
        return self.lm_head(self.final_layer_norm(x))


FLAVORS = {"tiny": {}}


def initial(c: Config) -> dict[str, Draw]:
    normal = Draw("normal", std=0.05)
    zeros = Draw("zeros")
    return {
        "*layer_norm.weight": Draw("ones"),
        "layers.*.*layer_norm.weight": Draw("ones"),
        "*.bias": zeros,
        "layers.*.*.bias": zeros,
        "layers.*.*.*.bias": zeros,
        "lm_head.weight": normal,
        "embeddings.*.weight": normal,
        "layers.*.*.weight": normal,
        "layers.*.*.*.weight": normal,
    }
