"""Optimizers in a file with ``build``, and a check that their state is complete for a resume.

The state of a parameter consists of named tensors, which are scalars or sharded over the parameter's mesh, so
a checkpoint fits any mesh. ``build`` creates it, or ``initial_state`` of the file, before the first step,
because checkpoints are loaded into it.

An optimizer may train other weights than it evaluates. Its method ``evaluation_weights(parameter)`` returns the
weights for validation, samples and checkpoints.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shardtrain.config.schema import Optimizer
from shardtrain.ops.dtensor import is_distributed
from shardtrain.utils import own_file
from shardtrain.utils.errors import ConfigError, Problem

# Small parameters of each kind: a matrix, a vector and a stack of matrices.
_SHAPES = ((6, 4), (6,), (2, 6, 4))
_NAMES = ("layers.0.matrix.weight", "layers.0.matrix.bias", "layers.0.experts.weight")
_STEPS = 2


def build(groups: list[dict[str, Any]], config: Optimizer) -> torch.optim.Optimizer:
    """Build the optimizer of a user's file, or of ``optim/NAME.py``, for parameter groups, with its initial
    state.

    Raises:
        ConfigError: the file does not exist, or ``build`` does not return an optimizer of these parameters
            with such a state.
    """
    return _build(_module(config), groups, config)


def check(config: Optimizer) -> None:
    """Check that a resume changes nothing: train small parameters, once without a break and once from a
    copied state.

    Raises:
        ConfigError: the results differ, or the state has other names after a step.
    """
    module = _module(config)
    # Both runs use the same gradients, so only the state can make them differ.
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in _SHAPES]
    gradients = []
    for _ in range(2 * _STEPS):
        gradients.append([torch.randn(shape, generator=generator) for shape in _SHAPES])

    # the first half of the steps
    parameters, optimizer = _fresh(module, values, config)
    initial_names = [set(optimizer.state[parameter]) for parameter in parameters]
    _train(optimizer, parameters, gradients[:_STEPS])
    for parameter, names in zip(parameters, initial_names, strict=True):
        state = optimizer.state[parameter]
        differing = names ^ set(state)
        if differing:
            listed = ", ".join(sorted(map(str, differing)))
            rule = f"has different state after a step than initial_state returns ({listed})"
            fix = "make initial_state return exactly the tensors that step stores in its state"
            raise _problem(config, rule, fix)
        _check_state(parameter, state, config)

    # the second half twice: continued, and from a copy of parameters and state like after a resume
    copies = [parameter.detach() for parameter in parameters]
    resumed_parameters, resumed_optimizer = _fresh(module, copies, config)
    for resumed, parameter in zip(resumed_parameters, parameters, strict=True):
        resumed_state = resumed_optimizer.state[resumed]
        for key, tensor in optimizer.state[parameter].items():
            resumed_state[key].copy_(tensor)
    _train(optimizer, parameters, gradients[_STEPS:])
    _train(resumed_optimizer, resumed_parameters, gradients[_STEPS:])
    for parameter in parameters:
        _check_evaluation_weights(optimizer, parameter, config)
    for resumed, parameter in zip(resumed_parameters, parameters, strict=True):
        if not torch.equal(resumed, parameter):
            rule = "continues differently after a resume: it has state outside of state[parameter]"
            fix = "keep counts and means in state[parameter], as tensors from initial_state"
            raise _problem(config, rule, fix)


def _module(config: Optimizer) -> ModuleType:
    """Return the file of an optimizer: the user's, or that of this package with the optimizer's name in
    lower case."""
    if config.name.endswith(".py"):
        return own_file.load(config.name, own_file.OPTIMIZER, "optimizer.name")
    return importlib.import_module(f"shardtrain.optim.{config.name.lower()}")


def _build(
    module: ModuleType, groups: list[dict[str, Any]], config: Optimizer
) -> torch.optim.Optimizer:
    """Build the optimizer of a module, and create and check its initial state."""
    # the file may form its own groups, but of exactly these parameters
    expected = _parameters_of(groups)
    optimizer = module.build(groups, config)
    if not isinstance(optimizer, torch.optim.Optimizer):
        rule = f"builds a {type(optimizer).__name__}"
        raise _problem(config, rule, "return a torch.optim.Optimizer from build")
    actual = _parameters_of(optimizer.param_groups)
    if set(map(id, actual)) != set(map(id, expected)):
        rule = f"has {len(actual)} of the {len(expected)} parameters that build received"
        raise _problem(config, rule, "pass all param_groups to the optimizer")
    # A checkpoint is loaded into the state, so it must exist before the first step.
    for parameter in expected:
        state = optimizer.state[parameter]
        if not state and hasattr(module, "initial_state"):
            state.update(module.initial_state(parameter))
        _check_state(parameter, state, config)
    return optimizer


def _parameters_of(groups: list[dict[str, Any]]) -> list[Parameter]:
    parameters: list[Parameter] = []
    for group in groups:
        parameters += group["params"]
    return parameters


def _check_state(parameter: Tensor, state: dict[Any, Any], config: Optimizer) -> None:
    for key, value in state.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            kind = type(value).__name__
            rule = f"stores {key!r} of a parameter as {kind}, which a checkpoint cannot store"
            fix = "store tensors with string keys; use torch.zeros(()) for a count"
            raise _problem(config, rule, fix)
        if value.ndim == 0:
            continue
        # a shape that comes from the local part of a parameter would change with the mesh
        fits = value.ndim == parameter.ndim and value.size(0) in parameter.shape
        if not fits or (is_distributed(parameter) and not is_distributed(value)):
            kind = "a DTensor" if is_distributed(value) else "a plain tensor"
            rule = (
                f"stores {key} as {kind} with shape {list(value.shape)} "
                f"for a parameter with shape {list(parameter.shape)}"
            )
            fix = "store scalars, or tensors with rows like the parameter, as DTensors on its mesh"
            raise _problem(config, rule, fix)


def _check_evaluation_weights(
    optimizer: torch.optim.Optimizer, parameter: Parameter, config: Optimizer
) -> None:
    """Check the optional method ``evaluation_weights`` of an optimizer."""
    if not hasattr(optimizer, "evaluation_weights"):
        return
    # The method must not have side effects: it is called during training.
    before = parameter.detach().clone()
    weights = optimizer.evaluation_weights(parameter)
    if not isinstance(weights, Tensor) or weights.shape != parameter.shape:
        rule = "returns evaluation_weights that do not have the shape of the parameter"
        raise _problem(config, rule, "return a tensor like the parameter")
    if not torch.equal(parameter, before):
        rule = "changes the parameter in evaluation_weights"
        raise _problem(config, rule, "return a new tensor")


def _fresh(
    module: ModuleType, values: list[Tensor], config: Optimizer
) -> tuple[list[Parameter], torch.optim.Optimizer]:
    """Return new parameters with these values, and their optimizer."""
    parameters = [Parameter(value.clone()) for value in values]
    groups = [
        {"params": parameters[:2], "param_names": list(_NAMES[:2]), "weight_decay": 0.1},
        {"params": parameters[2:], "param_names": list(_NAMES[2:]), "weight_decay": 0.0},
    ]
    return parameters, _build(module, groups, config)


def _train(
    optimizer: torch.optim.Optimizer, parameters: list[Parameter], gradients: list[list[Tensor]]
) -> None:
    """Make one step per list of gradients, with a falling learning rate."""
    for number, step in enumerate(gradients, 1):
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / number
        optimizer.step()


def _problem(config: Optimizer, rule: str, fix: str) -> ConfigError:
    return ConfigError(Problem("optimizer.name", config.name, rule, fix))
