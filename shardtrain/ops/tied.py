"""Parameters that two modules share. Some PyTorch calls silently untie them; these functions tie them again."""

from __future__ import annotations

import torch
from torch import nn


def tied_names(model: nn.Module) -> list[list[str]]:
    """Groups of names under which one and the same parameter is found, e.g. [["embed.weight", "head.weight"]]."""
    names_by_tensor: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_by_tensor.setdefault(id(parameter), []).append(name)
    return [names for names in names_by_tensor.values() if len(names) > 1]


def tie(model: nn.Module, groups: list[list[str]]) -> None:
    """Make the later names of each group the parameter of the first, where they no longer are."""
    for first, *others in groups:
        parameter = model.get_parameter(first)
        for name in others:
            if model.get_parameter(name) is not parameter:
                owner, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(owner), leaf, parameter)


def to_empty(model: nn.Module, device: torch.device | str = "cpu") -> None:
    """Allocate the memory of a model on the meta device. ``nn.Module.to_empty`` alone would untie its parameters."""
    ties = tied_names(model)
    model.to_empty(device=device)
    tie(model, ties)
