"""GPT-J (Wang and Komatsuzaki 2021): parallel layers, interleaved partial rotary angles, (B, N, T, H) core."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout


@dataclass(frozen=True)
class Config:
    vocab_size: int = 512
    n_embd: int = 32
    num_layers: int = 4
    num_heads: int = 4
    rotary_dim: int = 4


LAYOUT = Layout(
    first=("wte",),
    layers="h",
    last=("ln_f", "lm_head"),
    tensor={
        "wte": "embed",
        "h.*.ln_1": "sequence",
        "h.*.attn": "gather",
        "h.*.attn.[qkv]_proj": "colwise",
        "h.*.attn.out_proj": "rowwise",
        "h.*.mlp": "gather",
        "h.*.mlp.fc_in": "colwise",
        "h.*.mlp.fc_out": "rowwise",
        "ln_f": "sequence",
        "lm_head": "head",
    },
    context="h.*.attn.core",
)


def rotate_every_two(x, positions, dim):
    rotated = x[..., :dim]
    unrotated = x[..., dim:]
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, device=x.device).float() / dim)
    angles = (positions.float()[..., None] * frequencies).repeat_interleave(2, -1)[:, :, None]
    partner = torch.stack((-rotated[..., 1::2], rotated[..., ::2]), -1).flatten(-2)
    return torch.cat((rotated * angles.cos() + partner * angles.sin(), unrotated), -1)


class Core(nn.Module):
    heads_first = True  # input and output are (B, N, T, H)

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.n_embd // c.num_heads
        self.rotary_dim = c.rotary_dim
        self.q_proj = nn.Linear(c.n_embd, c.n_embd, bias=False)
        self.k_proj = nn.Linear(c.n_embd, c.n_embd, bias=False)
        self.v_proj = nn.Linear(c.n_embd, c.n_embd, bias=False)
        self.core = Core()
        self.out_proj = nn.Linear(c.n_embd, c.n_embd, bias=False)

    def forward(self, x, positions):
        B, T = positions.shape
        q = self.q_proj(x).view(B, T, -1, self.head_dim)
        k = self.k_proj(x).view(B, T, -1, self.head_dim)
        v = self.v_proj(x).view(B, T, -1, self.head_dim)
        q = rotate_every_two(q, positions, self.rotary_dim)
        k = rotate_every_two(k, positions, self.rotary_dim)
        out = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.out_proj(out.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.fc_in = nn.Linear(c.n_embd, 4 * c.n_embd)
        self.fc_out = nn.Linear(4 * c.n_embd, c.n_embd)

    def forward(self, x):
        return self.fc_out(F.gelu(self.fc_in(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1 = nn.LayerNorm(c.n_embd)
        self.attn = Attention(c)
        self.mlp = MLP(c)

    def forward(self, x, positions):
        y = self.ln_1(x)
        return x + self.attn(y, positions) + self.mlp(y)


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.h = nn.ModuleDict({str(i): Block(c) for i in range(c.num_layers)})
        self.ln_f = nn.LayerNorm(c.n_embd)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size)

    def forward(self, input_ids, position_ids):
        x = self.wte(input_ids)
        for block in self.h.values():
            x = block(x, position_ids)
        return self.lm_head(self.ln_f(x))


FLAVORS = {"tiny": {}}


def initial(c):
    weight = Draw("normal", std=0.1)
    bias = Draw("normal", std=0.02)
    return {
        "ln_f.weight": Draw("ones"),
        "h.*.ln_1.weight": Draw("ones"),
        "*.bias": bias,
        "h.*.*.bias": bias,
        "h.*.*.*.bias": bias,
        "*.weight": weight,
        "h.*.*.*.weight": weight,
    }
