"""Tied parameters: parameters shared by several modules.

Some PyTorch functions untie them; these tie them again.
"""

from __future__ import annotations

import torch
from torch import nn


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return the groups of names of the same parameter, such as [["embed.weight", "head.weight"]]."""
    names_by_tensor: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_by_tensor.setdefault(id(parameter), []).append(name)
    return [names for names in names_by_tensor.values() if len(names) > 1]


def tie(model: nn.Module, groups: list[list[str]]) -> None:
    """Register the parameter of the first name in each group under the group's other names."""
    for first, *others in groups:
        parameter = model.get_parameter(first)
        for name in others:
            if model.get_parameter(name) is not parameter:
                owner, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(owner), leaf, parameter)


def to_empty(model: nn.Module, device: torch.device | str = "cpu") -> None:
    """Allocate memory for a model on the meta device, and keep its ties, which ``nn.Module.to_empty`` removes."""
    ties = tied_names(model)
    model.to_empty(device=device)
    tie(model, ties)
