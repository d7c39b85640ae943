"""Model in Griffin's style (De et al. 2024): two layers with a gated linear recurrence, then one with a window."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout

FLAVORS = {"tiny": {}}


@dataclass(frozen=True)
class Config:
    vocab_size: int = 512
    dim: int = 32
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    window: int = 8


LAYOUT = Layout(
    first=("embed",),
    layers="layers",
    last=("norm", "head"),
    tensor={
        "embed": "embed",
        "layers.*.*norm": "sequence",
        "layers.*.rec": "gather",
        "layers.*.rec.[xy]": "colwise",
        "layers.*.rec.conv": "per_head",
        "layers.*.rec.lru": "per_head",
        "layers.*.rec.out": "rowwise",
        "layers.*.attn": "gather",
        "layers.*.attn.[qkv]": "colwise",
        "layers.*.attn.o": "rowwise",
        "layers.*.mlp": "gather",
        "layers.*.mlp.up": "colwise",
        "layers.*.mlp.down": "rowwise",
        "norm": "sequence",
        "head": "head",
    },
    context="layers.*.attn.core",
    optional=("layers.*.attn",),
)


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.up, self.down = (
            nn.Linear(c.dim, 2 * c.dim, bias=False),
            nn.Linear(2 * c.dim, c.dim, bias=False),
        )

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Conv(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.empty(width, 1, 4)),
            nn.Parameter(torch.empty(width)),
        )

    def forward(self, x):
        y = F.conv1d(
            F.pad(x.transpose(1, 2), (3, 0)), self.weight, self.bias, groups=self.weight.size(0)
        )
        return y.transpose(1, 2)


class RGLRU(nn.Module):
    """Real-gated linear recurrent unit. Its gates are block-diagonal linear functions."""

    def __init__(self, blocks, width):
        super().__init__()
        self.input_gate = nn.Parameter(torch.empty(blocks, width, width))
        self.recurrence_gate = nn.Parameter(torch.empty(blocks, width, width))
        self.rate = nn.Parameter(torch.empty(blocks, width))

    def forward(self, x):
        x = x.unflatten(-1, (-1, self.rate.size(1)))
        i, r = (
            torch.einsum("btnd,nde->btne", x, w).sigmoid()
            for w in (self.input_gate, self.recurrence_gate)
        )
        log_a = -8.0 * r * F.softplus(self.rate)
        gated_input = (1 - (2 * log_a).exp()).clamp_min(1e-6).sqrt() * i * x
        h = torch.zeros_like(x[:, 0])
        out = []
        for t in range(x.size(1)):
            h = log_a[:, t].exp() * h + gated_input[:, t]
            out.append(h)
        return torch.stack(out, 1).flatten(2)


class Recurrent(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.x, self.y, self.out = (
            nn.Linear(c.dim, c.dim),
            nn.Linear(c.dim, c.dim),
            nn.Linear(c.dim, c.dim),
        )
        self.conv, self.lru = Conv(c.dim), RGLRU(c.num_heads, c.dim // c.num_heads)

    def forward(self, x, positions):
        return self.out(self.lru(self.conv(self.x(x))) * F.gelu(self.y(x)))


class Core(nn.Module):
    def __init__(self, window):
        super().__init__()
        self.window = window

    def forward(self, q, k, v):
        T = torch.arange(q.size(1), device=q.device)
        lag = T[:, None] - T
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = (lag >= 0) & (lag < self.window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(
            1, 2
        )


def rotary(x, positions):
    angles = positions[..., None, None] * 1000.0 ** (
        -torch.arange(0, x.size(-1), 2, device=x.device) / x.size(-1)
    )
    a = x[..., ::2]
    b = x[..., 1::2]
    return torch.stack(
        [a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1
    ).flatten(-2)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.width = c.dim // c.num_heads
        self.q, self.o = nn.Linear(c.dim, c.dim, bias=False), nn.Linear(c.dim, c.dim)
        self.k, self.v = (
            nn.Linear(c.dim, c.num_kv_heads * self.width, bias=False) for _ in range(2)
        )
        self.core = Core(c.window)

    def forward(self, x, positions):
        q, k, v = (f(x).unflatten(-1, (-1, self.width)) for f in (self.q, self.k, self.v))
        return self.o(self.core(rotary(q, positions), rotary(k, positions), v).flatten(2))


class Layer(nn.Module):
    def __init__(self, c, index):
        super().__init__()
        self.mix_norm, self.mlp_norm, self.mlp = nn.RMSNorm(c.dim), nn.RMSNorm(c.dim), MLP(c)
        self.is_attention = index % 3 == 2
        if self.is_attention:
            self.attn = Attention(c)
        else:
            self.rec = Recurrent(c)

    def forward(self, x, positions):
        mix = self.attn if self.is_attention else self.rec
        x = x + mix(self.mix_norm(x), positions)
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.layers = nn.ModuleDict({str(i): Layer(c, i) for i in range(c.num_layers)})
        self.norm, self.head = nn.RMSNorm(c.dim), nn.Linear(c.dim, c.vocab_size, bias=False)

    def forward(self, tokens, positions):
        x = self.embed(tokens)
        for layer in self.layers.values():
            x = layer(x, positions)
        return self.head(self.norm(x))


def initial(c):
    return {
        "norm.weight": Draw("ones"),
        "layers.*.*norm.weight": Draw("ones"),
        "layers.*.rec.conv.*": Draw("normal", std=0.5),
        "layers.*.rec.lru.*": Draw("normal", std=0.3),
        "*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.bias": Draw("zeros"),
    }
