"""Model in DeepSeek's style: normalized latent keys and values, a dense first layer, then experts with a shared one."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout
from shardtrain.models.layers import AttentionCore, FeedForward, RotaryAngles, rotate
from shardtrain.models.moe import EXPERT_BIAS, EXPERT_STYLES, MoE, Routing, expert_draws


@dataclass(frozen=True)
class Config:
    vocab_size: int = 512
    dim: int = 32
    num_layers: int = 4
    num_dense_layers: int = 1
    num_heads: int = 4
    kv_latent: int = 12
    nope_dim: int = 8
    rope_dim: int = 4
    ffn_dim: int = 64
    moe_ffn_dim: int = 16
    num_experts: int = 4
    num_shared_experts: int = 1
    top_k: int = 2


LAYOUT = Layout(
    first=("embed",),
    layers="layers",
    last=("norm", "head"),
    tensor={
        "embed": "embed",
        "layers.*.*_norm": "sequence",
        "layers.*.attn": "gather",
        "layers.*.attn.q": "colwise",
        "layers.*.attn.down": "replicate",
        "layers.*.attn.latent_norm": "replicate",
        "layers.*.attn.shared_key": "copy",
        "layers.*.attn.up": "colwise",
        "layers.*.attn.out": "rowwise",
        "layers.*.ffn": "gather",
        "layers.*.ffn.w[13]": "colwise",
        "layers.*.ffn.w2": "rowwise",
        **EXPERT_STYLES,
        "layers.*.moe.shared": "gather",
        "layers.*.moe.shared.w[13]": "colwise",
        "layers.*.moe.shared.w2": "rowwise",
        "norm": "sequence",
        "head": "head",
    },
    context="layers.*.attn.core",
    expert="layers.*.moe",
    buffers=EXPERT_BIAS,
    optional=("layers.*.ffn", "layers.*.moe"),
)


class LatentAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.nope_dim = c.nope_dim
        self.rope_dim = c.rope_dim
        self.q = nn.Linear(c.dim, c.num_heads * (c.nope_dim + c.rope_dim), bias=False)
        self.down = nn.Linear(c.dim, c.kv_latent + c.rope_dim, bias=False)
        self.latent_norm = nn.RMSNorm(c.kv_latent, eps=1e-6)
        self.shared_key = nn.Identity()
        self.up = nn.Linear(c.kv_latent, c.num_heads * 2 * c.nope_dim, bias=False)
        self.core = AttentionCore()
        self.out = nn.Linear(c.num_heads * c.nope_dim, c.dim, bias=False)

    def forward(self, x, angles, documents_BT):
        q = self.q(x).unflatten(-1, (-1, self.nope_dim + self.rope_dim))
        latent, key = self.down(x).tensor_split((-self.rope_dim,), dim=-1)
        k, v = self.up(self.latent_norm(latent)).unflatten(-1, (-1, 2 * self.nope_dim)).chunk(2, -1)
        key = rotate(self.shared_key(key)[:, :, None], angles).expand(-1, -1, k.size(2), -1)
        q = torch.cat((q[..., : self.nope_dim], rotate(q[..., self.nope_dim :], angles)), -1)
        out = self.core(q, torch.cat((k, key), -1), F.pad(v, (0, self.rope_dim)), documents_BT)
        return self.out(out[..., : self.nope_dim].flatten(2))


class Layer(nn.Module):
    def __init__(self, c, dense):
        super().__init__()
        self.attn_norm = nn.RMSNorm(c.dim, eps=1e-6)
        self.ffn_norm = nn.RMSNorm(c.dim, eps=1e-6)
        self.attn = LatentAttention(c)
        if dense:
            self.ffn = FeedForward(c.dim, c.ffn_dim)
        else:
            routing = Routing(
                c.num_experts, c.top_k, "sigmoid", route_scale=1.5, balance_loss_coeff=1e-3
            )
            self.moe = MoE(c.dim, c.moe_ffn_dim, routing, c.num_shared_experts * c.moe_ffn_dim)
        self.dense = dense

    def forward(self, x, angles, documents_BT):
        x = x + self.attn(self.attn_norm(x), angles, documents_BT)
        y = self.ffn_norm(x)
        return x + (self.ffn(y) if self.dense else self.moe(y, documents_BT))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.rope = RotaryAngles(c.rope_dim, 10000.0)
        self.layers = nn.ModuleDict(
            {str(i): Layer(c, i < c.num_dense_layers) for i in range(c.num_layers)}
        )
        self.norm = nn.RMSNorm(c.dim, eps=1e-6)
        self.head = nn.Linear(c.dim, c.vocab_size, bias=False)

    def forward(self, tokens_BT, positions_BT, documents_BT=None):
        x = self.embed(tokens_BT)
        angles = self.rope(positions_BT)
        for layer in self.layers.values():
            x = layer(x, angles, documents_BT)
        return self.head(self.norm(x))


FLAVORS = {"tiny": {}}


def initial(c):
    weight = Draw("normal", std=0.2)
    return {
        "norm.weight": Draw("ones"),
        "layers.*.*_norm.weight": Draw("ones"),
        "layers.*.attn.latent_norm.weight": Draw("ones"),
        "*.weight": weight,
        "layers.*.attn.*.weight": weight,
        "layers.*.ffn.w?.weight": weight,
        "layers.*.moe.shared.w?.weight": weight,
        **expert_draws(0.3, "none"),
    }
