"""Optimizers in a file with ``build`` and ``initial_state``, and a check that they keep all that a resume needs.

The state of a parameter is tensors by name, each of the parameter's shape or one number, so that a checkpoint of it
fits any mesh. It is made before the first step, because a checkpoint is loaded into it.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shardtrain.config.schema import Optimizer
from shardtrain.utils import own_file
from shardtrain.utils.errors import ConfigError, Problem

_SHAPES = ((6, 4), (6,), (2, 6, 4))
_STEPS = 2


def build(groups: list[dict[str, Any]], config: Optimizer) -> torch.optim.Optimizer:
    """Build the optimizer of a user's file, or of ``optim/NAME.py``, for parameter groups, with its initial state.

    Raises:
        ConfigError: when there is no such file, or what it gives is not an optimizer of these parameters with such a
        state.
    """
    return _build(_module(config), groups, config)


def check(config: Optimizer) -> None:
    """Train three small parameters, and again from the state halfway: what a resume would do.

    Raises:
        ConfigError: when the second way gives other numbers, or the state changes its names while training.
    """
    module = _module(config)
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in _SHAPES]
    gradients = [[torch.randn(shape, generator=generator) for shape in _SHAPES] for _ in range(2 * _STEPS)]
    # half of the steps, then the rest of them twice: continued, and from a copy of the state as after a resume
    whole, optimizer = _fresh(module, values, config)
    names = [set(optimizer.state[parameter]) for parameter in whole]
    _train(optimizer, whole, gradients[:_STEPS])
    for parameter, known in zip(whole, names, strict=True):
        if other := sorted(map(str, known ^ set(optimizer.state[parameter]))):
            rule = f"keeps {', '.join(other)} of a parameter, which its initial_state does not give as it is kept"
            raise _problem(config, rule, "give in initial_state each tensor that step keeps, and no other")
        _check_state(parameter, optimizer.state[parameter], config)
    resumed, other_optimizer = _fresh(module, [parameter.detach() for parameter in whole], config)
    for mine, theirs in zip(resumed, whole, strict=True):
        for key, tensor in optimizer.state[theirs].items():
            other_optimizer.state[mine][key].copy_(tensor)
    for each, parameters in ((optimizer, whole), (other_optimizer, resumed)):
        _train(each, parameters, gradients[_STEPS:])
    if not all(torch.equal(mine, theirs) for mine, theirs in zip(resumed, whole, strict=True)):
        rule = "continues differently after a resume: it keeps something that is not in the state of its parameters"
        raise _problem(config, rule, "keep counts and means in state[parameter], as tensors that initial_state gives")


def _module(config: Optimizer) -> ModuleType:
    """Return the file of an optimizer: the user's, or that of this package with the optimizer's name in lower case."""
    if config.name.endswith(".py"):
        return own_file.load(config.name, own_file.OPTIMIZER, "optimizer.name")
    return importlib.import_module(f"shardtrain.optim.{config.name.lower()}")


def _build(module: ModuleType, groups: list[dict[str, Any]], config: Optimizer) -> torch.optim.Optimizer:
    # the file may make its own groups, but of these parameters and no others
    wanted = [parameter for group in groups for parameter in group["params"]]
    optimizer = module.build(groups, config)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise _problem(config, f"builds a {type(optimizer).__name__}", "return a torch.optim.Optimizer from build")
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if set(map(id, held)) != set(map(id, wanted)):
        rule = f"holds {len(held)} parameters of {len(wanted)} that it was given"
        raise _problem(config, rule, "hand all param_groups to the optimizer")
    for parameter in wanted:
        state = optimizer.state[parameter]
        if not state:
            state.update(module.initial_state(parameter))
        _check_state(parameter, state, config)
    return optimizer


def _check_state(parameter: Tensor, state: dict[Any, Any], config: Optimizer) -> None:
    for key, value in state.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            rule = f"keeps {key!r} of a parameter as {type(value).__name__}, which a checkpoint has no place for"
            raise _problem(config, rule, "keep tensors by name: a count is torch.zeros(())")
        if value.shape not in (parameter.shape, ()):
            rule = f"keeps {key} of shape {list(value.shape)} of a parameter of shape {list(parameter.shape)}"
            fix = "keep tensors of the parameter's shape, or single numbers: others fit no other mesh"
            raise _problem(config, rule, fix)


def _fresh(
    module: ModuleType, values: list[Tensor], config: Optimizer
) -> tuple[list[Parameter], torch.optim.Optimizer]:
    parameters = [Parameter(value.clone()) for value in values]
    groups = [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "weight_decay": 0.0}]
    return parameters, _build(module, groups, config)


def _train(optimizer: torch.optim.Optimizer, parameters: list[Parameter], gradients: list[list[Tensor]]) -> None:
    for number, step in enumerate(gradients, 1):
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / number
        optimizer.step()


def _problem(config: Optimizer, rule: str, fix: str) -> ConfigError:
    return ConfigError(Problem("optimizer.name", config.name, rule, fix))
