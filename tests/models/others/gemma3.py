"""Gemma 3 (2025): layers with and without a window, separate rotary angles for both kinds, norms of heads."""

from dataclasses import dataclass

import torch
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
    num_kv_heads: int = 2
    head_dim: int = 8
    ffn_dim: int = 64
    sliding_window: int = 11
    sliding_window_pattern: int = 2


LAYOUT = Layout(
    first=("embed_tokens",),
    layers="layers",
    last=("norm", "lm_head"),
    tensor={
        "embed_tokens": "embed",
        "layers.*.*_layernorm": "sequence",
        "layers.*.self_attn": "gather",
        "layers.*.self_attn.[qkv]_proj": "colwise",
        "layers.*.self_attn.[qk]_norm": "heads",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp": "gather",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
        "norm": "sequence",
        "lm_head": "head",
    },
    context="layers.*.self_attn.core",
)


class Embedding(nn.Embedding):
    def forward(self, tokens):
        scale = torch.tensor(self.embedding_dim**0.5, dtype=self.weight.dtype, device=tokens.device)
        return super().forward(tokens) * scale


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


class Attention(nn.Module):
    def __init__(self, c, is_sliding):
        super().__init__()
        self.head_dim = c.head_dim
        self.is_sliding = is_sliding
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim)
        self.k_norm = RMSNorm(c.head_dim)
        self.core = AttentionCore(window=c.sliding_window if is_sliding else 0, scale=24**-0.5)

    def forward(self, x, global_angles, local_angles, documents_BT):
        angles = local_angles if self.is_sliding else global_angles
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q = rotate(self.q_norm(q), angles)
        k = rotate(self.k_norm(k), angles)
        return self.o_proj(self.core(q, k, v, documents_BT).flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.ffn_dim, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.ffn_dim, bias=False)
        self.down_proj = nn.Linear(c.ffn_dim, c.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c, i):
        super().__init__()
        self.self_attn = Attention(c, bool((i + 1) % c.sliding_window_pattern))
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size)
        self.post_attention_layernorm = RMSNorm(c.hidden_size)
        self.pre_feedforward_layernorm = RMSNorm(c.hidden_size)
        self.post_feedforward_layernorm = RMSNorm(c.hidden_size)

    def forward(self, x, global_angles, local_angles, documents_BT):
        residual = x
        x = self.self_attn(self.input_layernorm(x), global_angles, local_angles, documents_BT)
        x = residual + self.post_attention_layernorm(x)
        residual = x
        x = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return residual + x


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size)
        self.rotary_emb = RotaryAngles(c.head_dim, 1e6, scaling="linear", factor=8.0)
        self.rotary_emb_local = RotaryAngles(c.head_dim, 1e4)
        self.layers = nn.ModuleDict({str(i): Layer(c, i) for i in range(c.num_layers)})
        self.norm = RMSNorm(c.hidden_size)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens, positions, documents_BT=None):
        x = self.embed_tokens(tokens)
        a = self.rotary_emb(positions)
        b = self.rotary_emb_local(positions)
        for layer in self.layers.values():
            x = layer(x, a, b, documents_BT)
        return self.lm_head(self.norm(x))


def initial(c):
    return {
        "norm.weight": Draw("zeros"),
        "layers.*.*_layernorm.weight": Draw("zeros"),
        "layers.*.self_attn.*_norm.weight": Draw("zeros"),
        "*.weight": Draw("normal", std=0.05),
        "layers.*.*.*.weight": Draw("normal", std=0.1),
    }
