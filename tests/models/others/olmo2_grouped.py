"""OLMo 2 with LayerNorm instead of RMSNorm over all heads, and fewer key heads than query heads."""

from dataclasses import dataclass

from torch import nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout
from shardtrain.models.layers import AttentionCore, RotaryAngles, rotate

FLAVORS = {"tiny": {}}


@dataclass(frozen=True)
class Config:
    vocab_size: int = 512
    dim: int = 32
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    ffn_dim: int = 64


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
        "layers.*.mlp": "gather",
        "layers.*.mlp.up": "colwise",
        "layers.*.mlp.down": "rowwise",
        "norm": "sequence",
        "head": "head",
        "layers.*.attn.[qk]_norm": "features",
    },
    context="layers.*.attn.core",
)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.hd = c.dim // c.num_heads
        self.wq = nn.Linear(c.dim, c.dim, bias=False)
        self.wo = nn.Linear(c.dim, c.dim, bias=False)
        self.wk = nn.Linear(c.dim, c.num_kv_heads * self.hd, bias=False)
        self.wv = nn.Linear(c.dim, c.num_kv_heads * self.hd, bias=False)
        self.q_norm = nn.LayerNorm(c.dim)
        self.k_norm = nn.LayerNorm(c.num_kv_heads * self.hd)
        self.core = AttentionCore()

    def forward(self, x, angles, documents_BT=None):
        q = self.q_norm(self.wq(x)).unflatten(-1, (-1, self.hd))
        k = self.k_norm(self.wk(x)).unflatten(-1, (-1, self.hd))
        v = self.wv(x).unflatten(-1, (-1, self.hd))
        out = self.core(rotate(q, angles), rotate(k, angles), v, documents_BT)
        return self.wo(out.flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.up = nn.Linear(c.dim, c.ffn_dim, bias=False)
        self.down = nn.Linear(c.ffn_dim, c.dim, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn_norm = nn.RMSNorm(c.dim)
        self.mlp_norm = nn.RMSNorm(c.dim)
        self.attn = Attention(c)
        self.mlp = MLP(c)

    def forward(self, x, angles):
        x = x + self.attn_norm(self.attn(x, angles))
        return x + self.mlp_norm(self.mlp(x))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.rope = RotaryAngles(c.dim // c.num_heads, 10000.0)
        self.layers = nn.ModuleDict({str(i): Layer(c) for i in range(c.num_layers)})
        self.norm = nn.RMSNorm(c.dim)
        self.head = nn.Linear(c.dim, c.vocab_size, bias=False)

    def forward(self, tokens, positions):
        x = self.embed(tokens)
        angles = self.rope(positions)
        for layer in self.layers.values():
            x = layer(x, angles)
        return self.head(self.norm(x))


def initial(c):
    return {
        "norm.weight": Draw("ones"),
        "layers.*.*_norm.weight": Draw("ones"),
        "*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.weight": Draw("normal", std=0.1),
        "layers.*.attn.*_norm.weight": Draw("ones"),
        "layers.*.attn.*_norm.bias": Draw("zeros"),
    }
