"""Your model: any nn.Module. Lines to change are marked with ----->.

The trainer builds it on the meta device and shards its layers over all ranks. Initial values of a parameter depend only
on its name and the seed, so they are equal on any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from shardtrain.layout import Draw, Layout


# -----> Fields that [model] overrides can set. Use only literals: the file is parsed before it is executed.
@dataclass(frozen=True)
class Config:
    num_features: int = 2
    width: int = 64
    num_layers: int = 2
    num_outputs: int = 2


# -----> Named sizes for model.flavor: fields of Config that differ from the defaults.
FLAVORS = {"debugmodel": {}, "wide": {"width": 1024}}

# -----> How the model can be split: modules before the layers, the layers, modules after them. Each module with
#        parameters has an entry in `tensor`; "*" stops at a dot. Use "replicate" unless you want tensor parallelism.
LAYOUT = Layout(
    first=("embed",),
    layers="layers",
    last=("head",),
    tensor={"embed": "replicate", "layers.*.*": "replicate", "head": "replicate"},
)


# -----> Your network. Repeated layers are in an nn.ModuleDict; a model without layers has a ModuleDict with one entry.
class Model(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed = nn.Linear(c.num_features, c.width)
        self.layers = nn.ModuleDict(
            {
                str(i): nn.Sequential(nn.GELU(), nn.Linear(c.width, c.width))
                for i in range(c.num_layers)
            }
        )
        self.head = nn.Linear(c.width, c.num_outputs)

    # -----> Takes the arguments passed by forward() in task.py.
    def forward(self, features_BF: Tensor) -> Tensor:
        x_BD = self.embed(features_BF)
        for layer in self.layers.values():
            x_BD = x_BD + layer(x_BD)
        return self.head(x_BD)


# -----> Initial values of each parameter, by the first pattern that matches its name.
def initial(c: Config) -> dict[str, Draw]:
    return {
        "embed.weight": Draw("normal", std=c.num_features**-0.5),
        "head.weight": Draw("normal", std=c.width**-0.5),
        "layers.*.*.weight": Draw("normal", std=c.width**-0.5),
        "*.bias": Draw("zeros"),
        "layers.*.*.bias": Draw("zeros"),
    }
