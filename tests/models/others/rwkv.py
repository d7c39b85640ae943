"""Model in RWKV's style (Peng et al. 2023): no attention; a shift by one and a decaying sum mix tokens."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout


@dataclass(frozen=True)
class Config:
    vocab_size: int = 512
    dim: int = 32
    num_layers: int = 4


LAYOUT = Layout(
    first=("emb", "ln0"),
    layers="blocks",
    last=("ln_out", "head"),
    tensor={
        "emb": "embed",
        "ln0": "sequence",
        "blocks.*.ln[12]": "sequence",
        "blocks.*.att": "gather",
        "blocks.*.att.shift": "replicate",
        "blocks.*.att.decay": "colwise",
        "blocks.*.att.receptance": "colwise",
        "blocks.*.att.key": "colwise",
        "blocks.*.att.value": "colwise",
        "blocks.*.att.output": "rowwise",
        "blocks.*.ffn": "gather",
        "blocks.*.ffn.shift": "replicate",
        "blocks.*.ffn.key": "colwise",
        "blocks.*.ffn.value": "rowwise",
        "ln_out": "sequence",
        "head": "head",
    },
)


class Shift(nn.Module):
    """Mix each token with the previous one, with a weight per feature."""

    def __init__(self, dim):
        super().__init__()
        self.mix = nn.Parameter(torch.full((dim,), 0.5))

    def forward(self, x):
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return x * self.mix + before * (1.0 - self.mix)


class TimeMix(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.shift = Shift(dim)
        self.decay = nn.Linear(dim, dim, bias=False)
        self.receptance = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        x = self.shift(x)
        w = self.decay(x)
        r = self.receptance(x)
        k = self.key(x)
        v = self.value(x)
        # log_weight[:, t, s]: logarithm of the weight that token s still has at token t
        decay = (-0.5 - F.softplus(w)).cumsum(1)
        log_weight = decay[:, :, None] - decay[:, None]
        hidden = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).triu(1)
        share = (
            (log_weight + k[:, None].tanh()).masked_fill(hidden[None, :, :, None], -torch.inf).exp()
        )
        summed = (share * v[:, None]).sum(2) / share.sum(2)
        return self.output(r.sigmoid() * summed)


class ChannelMix(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.shift = Shift(dim)
        self.key = nn.Linear(dim, 4 * dim, bias=False)
        self.value = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x):
        return self.value(self.key(self.shift(x)).relu().square())


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.ln1 = nn.LayerNorm(dim)
        self.ln2 = nn.LayerNorm(dim)
        self.att = TimeMix(dim)
        self.ffn = ChannelMix(dim)

    def forward(self, x):
        x = x + self.att(self.ln1(x))
        return x + self.ffn(self.ln2(x))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.dim)
        self.ln0 = nn.LayerNorm(c.dim)
        self.blocks = nn.ModuleDict({str(i): Block(c.dim) for i in range(c.num_layers)})
        self.ln_out = nn.LayerNorm(c.dim)
        self.head = nn.Linear(c.dim, c.vocab_size, bias=False)

    def forward(self, tokens, positions):
        x = self.ln0(self.emb(tokens))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.ln_out(x))


FLAVORS = {"tiny": {}}


def initial(c):
    return {
        "ln*.weight": Draw("ones"),
        "blocks.*.ln?.weight": Draw("ones"),
        "*.bias": Draw("zeros"),
        "blocks.*.ln?.bias": Draw("zeros"),
        "blocks.*.*.shift.mix": Draw("normal", std=0.5),
        "*.weight": Draw("normal", std=0.1),
        "blocks.*.*.*.weight": Draw("normal", std=0.2),
    }
