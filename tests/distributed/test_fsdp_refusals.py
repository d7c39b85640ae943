"""Parameters that FSDP cannot shard are rejected by name in one line, before any memory is allocated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardtrain.distributed import fsdp
from shardtrain.layout import Layout
from shardtrain.utils.errors import ConfigError

LAYOUT = Layout(first=("embed",), layers="layers", last=("head",))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(4)})


def built() -> Model:
    with torch.device("meta"):
        return Model()


def without_dimensions(model: Model) -> None:
    model.layers["1"].gain = torch.nn.Parameter(torch.empty((), device="meta"))


def shared_by_two_layers(model: Model) -> None:
    model.layers["3"].linear.weight = model.layers["0"].linear.weight


def with_two_dtypes(model: Model) -> None:
    model.layers["2"].linear.weight = nn.Parameter(
        torch.empty(8, 8, device="meta", dtype=torch.bfloat16)
    )


def shared_by_both_ends(model: Model) -> None:
    model.head.weight = model.embed.weight


REFUSED = {
    without_dimensions: "the 0-dimensional parameter layers.1.gain",
    shared_by_two_layers: "the same parameter as layers.0.linear.weight and layers.3.linear.weight",
    with_two_dtypes: "layers.2.linear.weight of bfloat16 and layers.2.linear.bias of float32",
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_parameters_that_cannot_be_sharded_are_rejected_by_name(
    change: Callable[[Model], None],
) -> None:
    model = built()
    change(model)
    with pytest.raises(ConfigError) as raised:
        fsdp._check_parameters(model, LAYOUT)

    message = str(raised.value)
    assert REFUSED[change] in message
    assert "\n" not in message


def test_first_and_last_modules_may_share_a_parameter() -> None:
    model = built()
    shared_by_both_ends(model)
    fsdp._check_parameters(model, LAYOUT)
