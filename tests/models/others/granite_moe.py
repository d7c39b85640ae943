"""Experts in Granite's style (IBM 2024): multipliers on embedding, attention, residual and logits; no shared expert."""

from dataclasses import dataclass

from torch import nn

from shardtrain.layout import Draw, Layout
from shardtrain.models.layers import AttentionCore, RotaryAngles, rotate
from shardtrain.models.moe import EXPERT_BIAS, EXPERT_STYLES, MoE, Routing, expert_draws


@dataclass(frozen=True)
class Config:
    vocab_size: int = 512
    dim: int = 32
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    moe_ffn_dim: int = 32
    num_experts: int = 4
    top_k: int = 2
    embedding_multiplier: float = 12.0
    attention_multiplier: float = 0.1
    residual_multiplier: float = 0.22
    logits_scaling: float = 8.0


LAYOUT = Layout(
    first=("embed",),
    layers="layers",
    last=("norm", "head"),
    tensor={
        "embed": "embed",
        "layers.*.*_norm": "sequence",
        "layers.*.attn": "gather",
        "layers.*.attn.w[qkv]": "colwise",
        "layers.*.attn.wo": "rowwise",
        **EXPERT_STYLES,
        "norm": "sequence",
        "head": "head",
    },
    context="layers.*.attn.core",
    expert="layers.*.moe",
    buffers=EXPERT_BIAS,
)


class Embed(nn.Embedding):
    def __init__(self, c):
        super().__init__(c.vocab_size, c.dim)
        self.multiplier = c.embedding_multiplier

    def forward(self, tokens):
        return self.multiplier * super().forward(tokens)


class Head(nn.Linear):
    def __init__(self, c):
        super().__init__(c.dim, c.vocab_size, bias=False)
        self.scaling = c.logits_scaling

    def forward(self, x):
        return super().forward(x) / self.scaling


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.dim // c.num_heads
        self.wq = nn.Linear(c.dim, c.dim, bias=False)
        self.wk = nn.Linear(c.dim, c.num_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(c.dim, c.num_kv_heads * self.head_dim, bias=False)
        self.core = AttentionCore(scale=c.attention_multiplier)
        self.wo = nn.Linear(c.dim, c.dim, bias=False)

    def forward(self, x, angles, documents_BT):
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))
        k = self.wk(x).unflatten(-1, (-1, self.head_dim))
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        out = self.core(rotate(q, angles), rotate(k, angles), v, documents_BT)
        return self.wo(out.flatten(2))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn_norm = nn.RMSNorm(c.dim, eps=1e-6)
        self.ffn_norm = nn.RMSNorm(c.dim, eps=1e-6)
        self.attn = Attention(c)
        self.moe = MoE(
            c.dim, c.moe_ffn_dim, Routing(c.num_experts, c.top_k, load_balance_coeff=1e-3)
        )
        self.residual_multiplier = c.residual_multiplier

    def forward(self, x, angles, documents_BT):
        x = x + self.residual_multiplier * self.attn(self.attn_norm(x), angles, documents_BT)
        return x + self.residual_multiplier * self.moe(self.ffn_norm(x), documents_BT)


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = Embed(c)
        self.rope = RotaryAngles(c.dim // c.num_heads, 10000.0)
        self.layers = nn.ModuleDict({str(i): Layer(c) for i in range(c.num_layers)})
        self.norm = nn.RMSNorm(c.dim, eps=1e-6)
        self.head = Head(c)

    def forward(self, tokens_BT, positions_BT, documents_BT=None):
        x = self.embed(tokens_BT)
        angles = self.rope(positions_BT)
        for layer in self.layers.values():
            x = layer(x, angles, documents_BT)
        return self.head(self.norm(x))


FLAVORS = {"tiny": {}}


def initial(c):
    return {
        "norm.weight": Draw("ones"),
        "layers.*.*_norm.weight": Draw("ones"),
        "*.weight": Draw("normal", std=0.1),
        "layers.*.attn.*.weight": Draw("normal", std=0.2),
        **expert_draws(0.3, "none"),
    }
