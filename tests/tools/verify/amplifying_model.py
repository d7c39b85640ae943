"""A correct model file that amplifies rounding: each round of a logistic map doubles the error of its state."""

from dataclasses import dataclass

from torch import nn

from shardtrain.layout import Draw, Layout


@dataclass(frozen=True)
class Config:
    vocab_size: int = 96
    dim: int = 32
    num_layers: int = 2
    rounds: int = 4


FLAVORS = {"tiny": {}}
LAYOUT = Layout(
    first=("embed",),
    layers="layers",
    last=("norm", "head"),
    tensor={
        "embed": "embed",
        "layers.*.norm": "sequence",
        "layers.*.mix": "gather",
        "layers.*.mix.drive": "colwise",
        "layers.*.mix.out": "rowwise",
        "norm": "sequence",
        "head": "head",
    },
)


class Reservoir(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.rounds = c.rounds
        self.drive, self.out = (
            nn.Linear(c.dim, 2 * c.dim, bias=False),
            nn.Linear(2 * c.dim, c.dim, bias=False),
        )

    def forward(self, x):
        state = self.drive(x).sigmoid()
        for _ in range(self.rounds):
            state = 3.9 * state * (1 - state)
        return self.out(state - 0.5)


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(c.dim), Reservoir(c)

    def forward(self, x):
        return x + self.mix(self.norm(x))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.layers = nn.ModuleDict({str(i): Layer(c) for i in range(c.num_layers)})
        self.norm, self.head = nn.LayerNorm(c.dim), nn.Linear(c.dim, c.vocab_size, bias=False)

    def forward(self, tokens, positions):
        x = self.embed(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x))


def initial(c):
    return {
        "*norm.weight": Draw("ones"),
        "*norm.bias": Draw("zeros"),
        "layers.*.norm.weight": Draw("ones"),
        "layers.*.norm.bias": Draw("zeros"),
        "*.weight": Draw("normal", std=0.1),
        "layers.*.*.*.weight": Draw("normal", std=0.1),
    }
