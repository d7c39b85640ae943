"""MiniCPM (2024): muP scales of embedding, residual branches and logits; fused gate and value."""

import math
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
    num_heads: int = 4
    ffn_dim: int = 64
    scale_emb: float = 12.0
    scale_depth: float = 1.4
    dim_model_base: int = 8


LAYOUT = Layout(
    first=("embed_tokens",),
    layers="layers",
    last=("norm", "lm_head"),
    tensor={
        "embed_tokens": "embed",
        "layers.*.*_layernorm": "sequence",
        "layers.*.self_attn": "gather",
        "layers.*.self_attn.[qkv]_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp": "gather",
        "layers.*.mlp.gate_up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
        "norm": "sequence",
        "lm_head": "head",
    },
    context="layers.*.self_attn.core",
)


class Embed(nn.Embedding):
    def __init__(self, c):
        super().__init__(c.vocab_size, c.hidden_size)
        self.c = c

    def forward(self, tokens):
        return super().forward(tokens) * self.c.scale_emb


class Head(nn.Linear):
    def __init__(self, c):
        super().__init__(c.hidden_size, c.vocab_size, bias=False)
        self.c = c

    def forward(self, x):
        return super().forward(x / (self.c.hidden_size / self.c.dim_model_base))


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.hidden_size // c.num_heads
        self.q_proj = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.o_proj = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.core = AttentionCore()

    def forward(self, x, angles, documents_BT):
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        out = self.core(rotate(q, angles), rotate(k, angles), v, documents_BT)
        return self.o_proj(out.flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_up_proj = nn.Linear(c.hidden_size, 2 * c.ffn_dim, bias=False)
        self.down_proj = nn.Linear(c.ffn_dim, c.hidden_size, bias=False)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).unflatten(-1, (-1, 2)).unbind(-1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.scale = c.scale_depth / math.sqrt(c.num_layers)
        self.input_layernorm = nn.RMSNorm(c.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size)
        self.self_attn = Attention(c)
        self.mlp = MLP(c)

    def forward(self, x, angles, documents_BT):
        x = x + self.self_attn(self.input_layernorm(x), angles, documents_BT) * self.scale
        return x + self.mlp(self.post_attention_layernorm(x)) * self.scale


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = Embed(c)
        self.rope = RotaryAngles(c.hidden_size // c.num_heads, 10000.0)
        self.layers = nn.ModuleDict({str(i): Layer(c) for i in range(c.num_layers)})
        self.norm = nn.RMSNorm(c.hidden_size)
        self.lm_head = Head(c)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens, positions, documents_BT=None):
        x = self.embed_tokens(tokens)
        angles = self.rope(positions)
        for layer in self.layers.values():
            x = layer(x, angles, documents_BT)
        return self.lm_head(self.norm(x))


def initial(c):
    return {
        "norm.weight": Draw("ones"),
        "layers.*.*_layernorm.weight": Draw("ones"),
        "*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.weight": Draw("normal", std=0.1),
    }
