"""Adam and AdamW, and their state as named tensors, so that a checkpoint needs no pickle and fits any mesh."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shardtrain.config.schema import Optimizer
from shardtrain.errors import ConfigError, Problem
from shardtrain.optim.groups import parameter_groups

_CLASSES: dict[str, type[torch.optim.Adam]] = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}
_STATE = ("exp_avg", "exp_avg_sq", "step")


def build(
    named_parameters: Iterable[tuple[str, Parameter]],
    config: Optimizer,
    all_names: Iterable[str] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of the given parameters (plain or DTensor); those that need no gradient are left out.

    Adam: Kingma and Ba, 2015. AdamW: Loshchilov and Hutter, 2019. The rate starts at ``config.lr``; set that of each
    step with ``set_learning_rate``. ``all_names`` are the parameters of the whole model, see ``parameter_groups``.

    Raises:
        ConfigError: when the optimizer is unknown, a pattern of no_weight_decay matches nothing, or no parameter
            needs a gradient.
    """
    if config.name not in _CLASSES:
        fix = f"use one of {', '.join(_CLASSES)}"
        raise ConfigError(Problem("optimizer.name", config.name, "is no optimizer", fix))
    trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    groups = parameter_groups(trained, config.no_weight_decay, config.weight_decay, all_names)
    if not groups:
        raise ConfigError(Problem("optimizer.name", config.name, "has no parameter to train", "unfreeze some"))
    return _CLASSES[config.name](
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=config.implementation == "fused",
        foreach=config.implementation == "foreach",
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of the next update in every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def state_tensors(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Parameter]]
) -> dict[str, Tensor]:
    """The optimizer's state by name: ``{parameter}.exp_avg``, ``.exp_avg_sq`` (like the parameter) and ``.step``.

    The tensors are the live ones: copying into them restores the state. Before the first update they are made as the
    first update would make them, zero. Parameters that the optimizer does not hold are left out.
    """
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    tensors = {}
    for name, parameter in named_parameters:
        if parameter not in groups:
            continue
        state = optimizer.state[parameter]
        if not state:
            state.update(_zero_state(parameter, groups[parameter]))
        tensors.update({f"{name}.{key}": state[key] for key in _STATE})
    return tensors


def _zero_state(parameter: Parameter, group: dict[str, Any]) -> dict[str, Tensor]:
    # the fused kernel reads the count of steps on the device, the others on the host (as torch.optim.Adam does)
    device = parameter.device if group["fused"] else torch.device("cpu")
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
    }
