"""Value residual (Zhou et al. 2024): every layer adds the attention values of the first layer."""

from dataclasses import dataclass

from torch import nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout
from shardtrain.models.layers import AttentionCore, HeadNumbers, RotaryAngles, rotate

FLAVORS = {"tiny": {}}


@dataclass(frozen=True)
class Config:
    vocab_size: int = 512
    dim: int = 32
    num_layers: int = 4
    num_heads: int = 4
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
        "layers.*.attn.mix": "per_head",
    },
    context="layers.*.attn.core",
)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.hd = c.dim // c.num_heads
        self.wq = nn.Linear(c.dim, c.dim, bias=False)
        self.wk = nn.Linear(c.dim, c.dim, bias=False)
        self.wv = nn.Linear(c.dim, c.dim, bias=False)
        self.wo = nn.Linear(c.dim, c.dim, bias=False)
        self.mix = HeadNumbers(c.num_heads)
        self.core = AttentionCore()

    def forward(self, x, angles, v1):
        q = self.wq(x).unflatten(-1, (-1, self.hd))
        k = self.wk(x).unflatten(-1, (-1, self.hd))
        v = self.wv(x).unflatten(-1, (-1, self.hd))
        v1 = v if v1 is None else v1
        mix = self.mix()[:, None]
        v = mix * v1 + (1 - mix) * v
        return self.wo(self.core(rotate(q, angles), rotate(k, angles), v).flatten(2)), v1


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

    def forward(self, x, angles, v1):
        y, v1 = self.attn(self.attn_norm(x), angles, v1)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), v1


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
        v1 = None
        for layer in self.layers.values():
            x, v1 = layer(x, angles, v1)
        return self.head(self.norm(x))


def initial(c):
    return {
        "norm.weight": Draw("ones"),
        "layers.*.*_norm.weight": Draw("ones"),
        "*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.weight": Draw("normal", std=0.1),
        "layers.*.attn.mix.weight": Draw("uniform", std=0.5),
    }
