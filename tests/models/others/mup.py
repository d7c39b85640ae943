"""muP's scales (Yang et al. 2022): scores are divided by the head dimension, logits by a ratio of widths."""

from dataclasses import dataclass

from torch import nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout


@dataclass(frozen=True)
class Config:
    vocab_size: int = 512
    width: int = 32
    base_width: int = 8
    num_layers: int = 4
    num_heads: int = 2
    max_tokens: int = 256


LAYOUT = Layout(
    first=("embed",),
    layers="layers",
    last=("readout",),
    tensor={
        "embed.*": "embed",
        "layers.*.norm?": "sequence",
        "layers.*.attn": "gather",
        "layers.*.attn.[qkv]": "colwise",
        "layers.*.attn.o": "rowwise",
        "layers.*.w1": "colwise",
        "layers.*.w2": "rowwise",
        "readout.norm": "sequence",
        "readout.linear": "head",
    },
    context="layers.*.attn.core",
)


class MupCore(nn.Module):
    def __init__(self, head_dim):
        super().__init__()
        self.scale = 1.0 / head_dim

    def forward(self, q, k, v):
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale).transpose(
            1, 2
        )


class Embed(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens = nn.Embedding(c.vocab_size, c.width)
        self.places = nn.Embedding(c.max_tokens, c.width)

    def forward(self, tokens, positions):
        return 4.0 * self.tokens(tokens) + self.places(positions)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim = c.width // c.num_heads
        self.q = nn.Linear(c.width, c.width)
        self.k = nn.Linear(c.width, c.width)
        self.v = nn.Linear(c.width, c.width)
        self.o = nn.Linear(c.width, c.width)
        self.core = MupCore(self.head_dim)

    def forward(self, x):
        heads = [w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.q, self.k, self.v)]
        return self.o(self.core(*heads).flatten(2))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1 = nn.LayerNorm(c.width)
        self.norm2 = nn.LayerNorm(c.width)
        self.attn = Attention(c)
        self.w1 = nn.Linear(c.width, 3 * c.width)
        self.w2 = nn.Linear(3 * c.width, c.width)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.w2(F.silu(self.w1(self.norm2(x))))


class Readout(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.LayerNorm(c.width)
        self.linear = nn.Linear(c.width, c.vocab_size, bias=False)
        self.ratio = c.width / c.base_width

    def forward(self, x):
        return self.linear(self.norm(x) / self.ratio)


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = Embed(c)
        self.readout = Readout(c)
        self.layers = nn.ModuleDict({str(i): Layer(c) for i in range(c.num_layers)})

    def forward(self, tokens, positions):
        x = self.embed(tokens, positions)
        for layer in self.layers.values():
            x = layer(x)
        return self.readout(x)


FLAVORS = {"tiny": {}}


def initial(c):
    weight = Draw("normal", std=c.width**-0.5)
    bias = Draw("zeros")
    norms = ("readout.norm", "layers.*.norm?")
    return {
        **{f"{name}.weight": Draw("ones") for name in norms},
        **{f"{name}.bias": bias for name in (*norms, "layers.*.w?", "layers.*.attn.?")},
        "embed.*.weight": Draw("normal", std=0.3),
        "readout.linear.weight": weight,
        "layers.*.w?.weight": weight,
        "layers.*.attn.?.weight": weight,
    }
