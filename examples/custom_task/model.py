"""Your model: any nn.Module. Lines to change are marked with ----->.

The trainer builds it without memory, shards it over all ranks layer by layer, and gives each parameter its first values
by name, so that they are the same on any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from shardtrain.layout import Draw, Layout


# -----> What can be set by [model] overrides. Literals alone: the file is read before it is run.
@dataclass(frozen=True)
class Config:
    num_features: int = 2
    width: int = 64
    num_layers: int = 2
    num_outputs: int = 2


# -----> Named sizes, for model.flavor: the fields of Config that differ.
FLAVORS = {"debugmodel": {}, "wide": {"width": 1024}}

# -----> Where the model may be cut: what comes before the layers, the layers, what comes after. Each module that owns
#        parameters has a line in `tensor`; "*" stops at a dot. "replicate" is right unless you want tensor parallelism.
LAYOUT = Layout(
    first=("embed",),
    layers="layers",
    last=("head",),
    tensor={"embed": "replicate", "layers.*.*": "replicate", "head": "replicate"},
)


# -----> Your network. Repeated layers sit in an nn.ModuleDict; a model of one piece is a ModuleDict of one entry.
class Model(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed = nn.Linear(c.num_features, c.width)
        self.layers = nn.ModuleDict(
            {str(i): nn.Sequential(nn.GELU(), nn.Linear(c.width, c.width)) for i in range(c.num_layers)}
        )
        self.head = nn.Linear(c.width, c.num_outputs)

    # -----> It takes what forward() of task.py gives it.
    def forward(self, features_BF: Tensor) -> Tensor:
        x_BD = self.embed(features_BF)
        for layer in self.layers.values():
            x_BD = x_BD + layer(x_BD)
        return self.head(x_BD)


# -----> How each parameter starts; the first pattern that fits a name counts.
def initial(c: Config) -> dict[str, Draw]:
    return {
        "embed.weight": Draw("normal", std=c.num_features**-0.5),
        "head.weight": Draw("normal", std=c.width**-0.5),
        "layers.*.*.weight": Draw("normal", std=c.width**-0.5),
        "*.bias": Draw("zeros"),
        "layers.*.*.bias": Draw("zeros"),
    }
