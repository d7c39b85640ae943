"""OpenELM (Mehta et al. 2024): each layer has its own number of heads and its own feed-forward width."""

from dataclasses import dataclass

from torch import nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout
from shardtrain.models.layers import AttentionCore, RotaryAngles, rotate


@dataclass(frozen=True)
class Config:
    vocab_size: int = 512
    dim: int = 32
    num_layers: int = 4
    head_dim: int = 8
    ffn_step: int = 32


LAYOUT = Layout(
    first=("embed",),
    layers="layers",
    last=("norm", "head"),
    tensor={
        "embed": "embed",
        "layers.*.*_norm": "sequence",
        "layers.*.attn": "gather",
        "layers.*.attn.qkv": "colwise",
        "layers.*.attn.[qk]_norm": "heads",
        "layers.*.attn.out": "rowwise",
        "layers.*.ffn": "gather",
        "layers.*.ffn.proj_1": "colwise",
        "layers.*.ffn.proj_2": "rowwise",
        "norm": "sequence",
        "head": "head",
    },
    context="layers.*.attn.core",
)


class Attention(nn.Module):
    def __init__(self, c, groups):
        super().__init__()
        self.head_dim = c.head_dim
        # per group: two q, one k, one v
        self.qkv = nn.Linear(c.dim, groups * 4 * c.head_dim, bias=False)
        self.q_norm = nn.RMSNorm(c.head_dim, eps=1e-6)
        self.k_norm = nn.RMSNorm(c.head_dim, eps=1e-6)
        self.core = AttentionCore()
        self.out = nn.Linear(groups * 2 * c.head_dim, c.dim, bias=False)

    def forward(self, x, angles, documents_BT):
        groups = self.qkv(x).unflatten(-1, (-1, 4, self.head_dim))
        q = groups[..., :2, :].flatten(2, 3)
        k = groups[..., 2, :]
        v = groups[..., 3, :]
        q = rotate(self.q_norm(q), angles)
        k = rotate(self.k_norm(k), angles)
        return self.out(self.core(q, k, v, documents_BT).flatten(2))


class GatedFFN(nn.Module):
    def __init__(self, dim, width):
        super().__init__()
        # gate and value of each feature are adjacent
        self.proj_1 = nn.Linear(dim, 2 * width, bias=False)
        self.proj_2 = nn.Linear(width, dim, bias=False)

    def forward(self, x):
        gate, value = self.proj_1(x).unflatten(-1, (-1, 2)).unbind(-1)
        return self.proj_2(F.silu(gate) * value)


class Layer(nn.Module):
    def __init__(self, c, index):
        super().__init__()
        self.attn_norm = nn.RMSNorm(c.dim, eps=1e-6)
        self.ffn_norm = nn.RMSNorm(c.dim, eps=1e-6)
        self.attn = Attention(c, groups=4 if index % 2 else 2)
        self.ffn = GatedFFN(c.dim, c.ffn_step * (1 + index))

    def forward(self, x, angles, documents_BT):
        x = x + self.attn(self.attn_norm(x), angles, documents_BT)
        return x + self.ffn(self.ffn_norm(x))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.rope = RotaryAngles(c.head_dim, 10000.0)
        self.layers = nn.ModuleDict({str(i): Layer(c, i) for i in range(c.num_layers)})
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
    return {
        "norm.weight": Draw("ones"),
        "layers.*.*_norm.weight": Draw("ones"),
        "layers.*.attn.*_norm.weight": Draw("ones"),
        "*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.weight": Draw("normal", std=0.2),
    }
