"""Find the expert weights of ``transformers`` networks, to count only those that a token uses.

Experts are stacks, whose dim 0 is the expert, or the items of a module list. Other forms are not known, and all of
their weights count as used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from shardtrain.models import experts_interface

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in configs."""
_TOP_K = ("top_k", "num_experts_per_tok", "num_experts_per_token")
"""Attributes of routers and blocks with the number of experts per token."""


def idle_numel(network: Any, top_k: int, only_trained: bool = False) -> int:
    """Return the number of expert weights that a token does not use.

    Args:
        network: a network of ``transformers``.
        top_k: experts per token, for experts whose router does not have the number.
        only_trained: count only weights that require a gradient.
    """
    total = 0
    for path, num_experts, parameters in _experts(network):
        in_experts = 0
        for parameter in parameters:
            if parameter.requires_grad or not only_trained:
                in_experts += parameter.numel()
        block = network.get_submodule(path.rpartition(".")[0])
        used = min(_top_k(block) or top_k, num_experts)
        total += in_experts - in_experts * used // num_experts
    return total


def _experts(network: Any) -> Iterator[tuple[str, int, list[nn.Parameter]]]:
    """Yield path, number of experts and weights of the modules that hold experts."""
    counts = _numbers_of_experts(network.config.get_text_config())
    for path, module in network.named_modules():
        if isinstance(module, nn.ModuleList):
            if len(module) in counts and path.rpartition(".")[2] == "experts":
                yield path, len(module), list(module.parameters())
            continue
        stacks = _stacks(module)
        if not stacks:
            continue
        num_experts = stacks[0].shape[0]
        if experts_interface.is_experts(module) or num_experts in counts:
            # Adapters of the stacks belong to submodules. Their dim 0 is the expert, too
            expert_weights = []
            for parameter in module.parameters():
                if parameter.ndim and parameter.shape[0] == num_experts:
                    expert_weights.append(parameter)
            yield path, num_experts, expert_weights


def _stacks(module: nn.Module) -> list[nn.Parameter]:
    """Return the direct parameters of a module that are stacks of matrices."""
    if isinstance(module, nn.Conv1d):
        return []
    return [parameter for parameter in module.parameters(recurse=False) if parameter.ndim == 3]


def _numbers_of_experts(config: Any) -> set[int]:
    numbers: set[int] = set()
    for name in _COUNTS:
        # Some networks have another number of experts in each layer
        value = getattr(config, name, None)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and number > 1:
                numbers.add(number)
    return numbers


def _top_k(block: nn.Module) -> int:
    """Return the number of experts per token of a block with a router, or 0 if no module has it."""
    for module in block.modules():
        for name in _TOP_K:
            value = getattr(module, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return 0
