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
        self.up = nn.Linear(c.dim, 2 * c.dim, bias=False)
        self.down = nn.Linear(2 * c.dim, c.dim, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Conv(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 1, 4))
        self.bias = nn.Parameter(torch.empty(width))

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
        i = torch.einsum("btnd,nde->btne", x, self.input_gate).sigmoid()
        r = torch.einsum("btnd,nde->btne", x, self.recurrence_gate).sigmoid()
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
        self.x = nn.Linear(c.dim, c.dim)
        self.y = nn.Linear(c.dim, c.dim)
        self.out = nn.Linear(c.dim, c.dim)
        self.conv = Conv(c.dim)
        self.lru = RGLRU(c.num_heads, c.dim // c.num_heads)

    def forward(self, x, positions):
        return self.out(self.lru(self.conv(self.x(x))) * F.gelu(self.y(x)))


class Core(nn.Module):
    def __init__(self, window):
        super().__init__()
        self.window = window

    def forward(self, q, k, v):
        T = torch.arange(q.size(1), device=q.device)
        lag = T[:, None] - T
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
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
        self.q = nn.Linear(c.dim, c.dim, bias=False)
        self.o = nn.Linear(c.dim, c.dim)
        self.k = nn.Linear(c.dim, c.num_kv_heads * self.width, bias=False)
        self.v = nn.Linear(c.dim, c.num_kv_heads * self.width, bias=False)
        self.core = Core(c.window)

    def forward(self, x, positions):
        q = self.q(x).unflatten(-1, (-1, self.width))
        k = self.k(x).unflatten(-1, (-1, self.width))
        v = self.v(x).unflatten(-1, (-1, self.width))
        out = self.core(rotary(q, positions), rotary(k, positions), v)
        return self.o(out.flatten(2))


class Layer(nn.Module):
    def __init__(self, c, index):
        super().__init__()
        self.mix_norm = nn.RMSNorm(c.dim)
        self.mlp_norm = nn.RMSNorm(c.dim)
        self.mlp = MLP(c)
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
        self.norm = nn.RMSNorm(c.dim)
        self.head = nn.Linear(c.dim, c.vocab_size, bias=False)

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
