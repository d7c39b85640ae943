"""The chain of modules that pipelines require: any data path other than x is detected, and a valid forward passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardtrain.distributed import chain
from shardtrain.layout import Layout
from shardtrain.utils.errors import ConfigError

LAYOUT = Layout(first=("embed",), layers="layers", last=("norm", "head"))
PARTS = [["embed", "layers.0", "layers.1"], ["layers.2", "layers.3", "norm", "head"]]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(8, 8), {}

    def forward(self, x: Tensor, more: object = None) -> Tensor:
        y = self.linear(x)
        if isinstance(more, dict):  # values of the first layer that the others use
            y = y + more.setdefault("first", y)
        if isinstance(more, float):
            y = y * more
        if self.kept is not None and "all" in self.kept:
            y = y + self.kept["all"].setdefault("first", y)
        return x + y + (more if isinstance(more, Tensor) else 0.0)


class Model(nn.Module):
    """A valid chain. ``run`` replaces the loop over the layers."""

    def __init__(self, run: Callable[[Model, Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.run = run
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(4)})
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 16)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.run is not None:
            x = self.run(self, x, positions)
        else:
            for layer in self.layers.values():
                x = layer(x)
        return self.head(self.norm(x))


def values_of_the_first(model: Model, x: Tensor, _: Tensor) -> Tensor:
    values: dict[str, Tensor] = {}
    for layer in model.layers.values():
        x = layer(x, values)
    return x


def values_by_an_attribute(model: Model, x: Tensor, _: Tensor) -> Tensor:
    values: dict[str, Tensor] = {}
    for layer in model.layers.values():
        layer.kept = {"all": values}
        x = layer(x)
    return x


def skips(model: Model, x: Tensor, _: Tensor) -> Tensor:
    outputs: list[Tensor] = []
    for i, layer in model.layers.items():
        x = layer(x, outputs.pop() if int(i) > 1 and outputs else None)
        outputs.append(x)
    return x


def first_embedding(model: Model, x: Tensor, _: Tensor) -> Tensor:
    start = x
    for layer in model.layers.values():
        x = layer(x, start)
    return x


def place_in_the_loop(model: Model, x: Tensor, positions: Tensor) -> Tensor:
    for i, layer in enumerate(model.layers.values()):
        x = layer(x, positions[..., None].float() * (1.0 if i % 3 else 0.5))
    return x


def number_of_layers(model: Model, x: Tensor, _: Tensor) -> Tensor:
    for layer in model.layers.values():
        x = layer(x, 1.0 / len(model.layers))
    return x


def by_key(model: Model, x: Tensor, positions: Tensor) -> Tensor:
    for i, layer in model.layers.items():
        x = layer(x, positions[..., None].float() * (1.0 if int(i) % 3 else 0.5))
    return x


def built(run: Callable[[Model, Tensor, Tensor], Tensor] | None) -> Model:
    with torch.device("meta"):
        return Model(run)


BROKEN = {
    values_of_the_first: "layers.1 receives outputs of other modules in addition to x",
    values_by_an_attribute: "layers.1 uses layers.0.linear.",
    skips: "layers.2 receives outputs of other modules in addition to x",
    first_embedding: "layers.0 receives outputs of other modules in addition to x",
    place_in_the_loop: "layers.2 receives different arguments in its stage than in the full model",
    number_of_layers: "receives different arguments in its stage than in the full model",
}


@pytest.mark.parametrize("run", BROKEN, ids=lambda run: run.__name__)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_data_path_other_than_x_is_rejected(
    run: Callable[[Model, Tensor, Tensor], Tensor], is_frozen: bool
) -> None:
    model = built(run)
    if is_frozen:  # frozen like a model with adapters: gradients reveal nothing
        model.requires_grad_(False)
        model.layers["3"].requires_grad_(True)

    with pytest.raises(ConfigError) as raised:
        chain.check(model, LAYOUT, PARTS, 2)

    message = str(raised.value)
    expected = (
        BROKEN[run]
        if not is_frozen
        else BROKEN[run].replace("layers.0.linear.", "the output of embed")
    )

    assert expected in message
    assert "\n" not in message


def test_weight_of_another_module_is_rejected() -> None:
    class Head(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input @ self.others[0].weight.T

    model = built(None)
    with torch.device("meta"):
        model.head = Head(8, 16)
    # not a submodule, so no parameter name shows that the weight is shared
    model.head.others = [model.embed]

    with pytest.raises(ConfigError, match="head uses embed.weight in addition to x"):
        chain.check(model, LAYOUT, PARTS, 2)


@pytest.mark.parametrize("run", [None, by_key], ids=["sound", "by key"])
def test_valid_chain_passes_for_any_split_and_is_unchanged(
    run: Callable[..., Tensor] | None,
) -> None:
    model = built(run)
    attributes_before = [list(vars(module)) for module in model.modules()]
    names = [name for part in PARTS for name in part]
    chain.check(model, LAYOUT, [names], 2)
    for cut in range(1, len(names)):
        chain.check(model, LAYOUT, [names[:cut], names[cut:]], 2)

    assert [list(vars(module)) for module in model.modules()] == attributes_before
