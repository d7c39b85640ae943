"""Shared parameters are found under all their names, and tied again after calls that untie them."""

from __future__ import annotations

import pytest
import torch
from tiny import SHAPE
from torch import nn

from shardtrain.models import build, find, shape_of
from shardtrain.ops.tied import tie, tied_names


class Three(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.inner = nn.ModuleDict({"0": nn.Linear(3, 5, bias=False)})
        self.head = nn.Linear(3, 5, bias=True)
        if tied:
            self.head.weight = self.embed.weight
            self.inner["0"].weight = self.embed.weight


def test_all_names_of_a_shared_parameter_are_found() -> None:
    assert tied_names(Three()) == [["embed.weight", "inner.0.weight", "head.weight"]]


def test_equal_values_are_not_shared_parameters() -> None:
    model = Three(tied=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    assert tied_names(model) == []


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_untied_parameters_are_tied_again(device: str) -> None:
    with torch.device("meta"):
        model = Three()
    groups = tied_names(model)
    model.to_empty(device=device)  # unties them in some versions of PyTorch
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    tie(model, groups)

    assert model.head.weight is model.embed.weight is model.inner["0"].weight
    assert dict(model.named_parameters()).keys() == {"embed.weight", "head.bias"}


def test_no_groups_change_nothing() -> None:
    model = Three(tied=False)
    before = dict(model.named_parameters())
    tie(model, [])
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_llama_ties_its_head_if_configured(tied: bool) -> None:
    module = find("llama3")
    model = build(
        module, shape_of(module, "debugmodel", {**SHAPE, "tied_embeddings": tied}, "rmsnorm")
    )
    assert tied_names(model) == ([["embed.weight", "head.weight"]] if tied else [])


def test_cast_on_the_meta_device_keeps_parameters_shared() -> None:
    """The model is cast before its parameters are tied again."""
    with torch.device("meta"):
        model = Three()
    groups = tied_names(model)
    assert tied_names(model.to(torch.bfloat16)) == groups
