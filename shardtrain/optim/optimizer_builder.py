"""Build the optimizer of the config, and return its state as named tensors for checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shardtrain.config.schema import Optimizer
from shardtrain.facts.optimizers import OPTIMIZERS, PYTORCH_ADAMS
from shardtrain.optim import own_optimizer
from shardtrain.optim.adamw import CLASSES, adam, adam_zero_state
from shardtrain.optim.low_bits import EIGHT_BITS, LowBitsAdam
from shardtrain.optim.muon import Muon, check_patterns, muon_groups
from shardtrain.optim.param_groups import parameter_groups, report_unused_patterns
from shardtrain.utils.errors import ConfigError, Problem


def build(
    named_parameters: Iterable[tuple[str, Parameter]],
    config: Optimizer,
    all_names: Iterable[str] | None = None,
    seed: int = 0,
) -> torch.optim.Optimizer:
    """Build the optimizer of the given parameters (plain or DTensor). Frozen parameters are skipped.

    The learning rate starts at ``config.lr``; change it with ``set_learning_rate``. ``all_names`` are the
    parameters of the entire model if ``named_parameters`` is one pipeline stage. ``seed`` seeds stochastic
    rounding.

    Raises:
        ConfigError: the optimizer is unknown, a pattern of muon_adamw_patterns matches nothing, or no
            parameter needs a gradient.
    """
    if not config.name.endswith(".py") and config.name not in OPTIMIZERS:
        raise ConfigError(
            Problem(
                "optimizer.name",
                config.name,
                rule="is not an optimizer",
                fix=f"use one of {', '.join(OPTIMIZERS)}, or the path of a Python file",
            )
        )
    # frozen parameters have neither gradient nor state
    trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    names = [name for name, _ in trained] if all_names is None else list(all_names)
    report_unused_patterns(config.no_weight_decay, names)
    # the file of a user may read these patterns too
    if config.name == "Muon" or config.muon_adamw_patterns != Optimizer().muon_adamw_patterns:
        check_patterns(config.muon_adamw_patterns, names)
    if config.name == "Muon":
        groups = muon_groups(trained, config)
    else:
        groups = parameter_groups(trained, config.no_weight_decay, config.weight_decay)
    if not groups:
        raise ConfigError(
            Problem(
                "optimizer.name",
                config.name,
                rule="has no parameter to train",
                fix="unfreeze some; every pipeline stage needs adapters (lora.target_modules)",
            )
        )
    # PyTorch's Adam and AdamW keep their state in the dtype of the weights, without stochastic rounding
    needs_low_bits = config.state_dtype != "default" or config.bf16_stochastic_round
    if config.name == EIGHT_BITS or (config.name in PYTORCH_ADAMS and needs_low_bits):
        return LowBitsAdam(groups, config, {parameter: name for name, parameter in trained}, seed)
    if config.name in PYTORCH_ADAMS:
        return adam(groups, config)
    if config.name == "Muon":
        return Muon(groups, config)
    return own_optimizer.build(groups, config)


def decides_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """True if a boolean on the device can skip an update: the fused kernels of Adam and AdamW read
    ``found_inf``.

    PyTorch's GradScaler uses the same mechanism. A skipped update does not change the step counts either.
    """
    if not isinstance(optimizer, tuple(CLASSES.values())):
        return False
    return all(group["fused"] for group in optimizer.param_groups)


def state_tensors(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Parameter]]
) -> dict[str, Tensor]:
    """Return the optimizer's state by name: ``{parameter}.exp_avg``, ``.exp_avg_sq`` (like the parameter)
    and ``.step``.

    A matrix that Muon updates has only ``{parameter}.momentum``. A user's optimizer has the state that its
    file creates. The tensors are the live ones, so copying into them restores the state. Before the first
    update they are created with their initial values. Parameters that the optimizer does not have are
    skipped.
    """
    # map each parameter to its group, which determines its update
    groups: dict[Tensor, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            groups[parameter] = group
    tensors = {}
    for name, parameter in named_parameters:
        if parameter not in groups:
            continue
        state = optimizer.state[parameter]
        if not state:
            state.update(_zero_state(optimizer, parameter, groups[parameter]))
        for key, tensor in state.items():
            tensors[f"{name}.{key}"] = tensor
    return tensors


def _zero_state(
    optimizer: torch.optim.Optimizer, parameter: Parameter, group: dict[str, Any]
) -> dict[str, Tensor]:
    """Return the state of a parameter before its first update. Empty for a user's optimizer."""
    if isinstance(optimizer, Muon):
        return optimizer.zero_state(parameter, group)
    if isinstance(optimizer, LowBitsAdam):
        return optimizer.zero_state(parameter)
    if isinstance(optimizer, torch.optim.Adam):
        return adam_zero_state(parameter, group["fused"])
    return {}
