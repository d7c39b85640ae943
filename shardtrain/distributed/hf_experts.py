"""Expert parallelism of ``transformers`` networks: the stacked experts of its experts interface are split over ep.

The router, its choice and its weights are those of the network. Only the call of the experts is replaced: tokens
travel to the ranks of their experts, as in ``expert_parallel``. Between the split modules of tensor parallelism the
tokens are replicated, so each tensor-parallel rank sends its part of them, and gathers the outputs of all.
Shape suffixes: S tokens, D model, K experts per token, R = S K rows, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardtrain.config.rules.experts_rules import DEGREE
from shardtrain.config.schema import Config
from shardtrain.distributed.hf_stages import USE_FSDP
from shardtrain.lora.linear import is_adapter
from shardtrain.ops.row_order import inverse_of, permute, repeat_and_permute
from shardtrain.utils.errors import ConfigError, Problem

Compute = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Called with the experts, rows sorted by expert, and the number of rows of each expert. Returns outputs."""


def check(model: Any, config: Config) -> None:
    """Reject a network whose experts cannot be divided among ranks.

    Raises:
        ConfigError: the message names the module.
    """
    degree = config.parallelism.expert_parallel_degree
    name = model.config_name
    if not model.experts:
        separate = _separate_experts(model)
        rule = f"requires a network with experts, and {name} has none"
        if separate:
            rule = f"requires experts that use the experts interface of transformers, and {separate} of {name} does not"
        raise ConfigError(Problem(DEGREE, degree, rule, USE_FSDP))
    for path, experts in model.experts.items():
        parameters = dict(experts.named_parameters())
        count = next(iter(parameters.values())).shape[0]
        rule = ""
        if count % degree:
            rule = f"does not divide the {count} experts of {path}"
        elif any(is_adapter(parameter) for parameter in parameters):
            rule = f"is not supported with adapters on the experts of {path}"
        elif any(
            "." in parameter or stack.shape[0] != count for parameter, stack in parameters.items()
        ):
            rule = f"requires weights with one row per expert, and {path} has others"
        if rule:
            raise ConfigError(Problem(DEGREE, degree, rule, USE_FSDP))


def _separate_experts(model: nn.Module) -> str:
    """Return the path of the first module whose name or class contains "expert", or ""."""
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if "expert" in f"{name} {type(module).__name__}".lower():
            return path
    return ""


def use_dispatch(
    experts: nn.Module, compute: Compute, dispatch: nn.Module, group: dist.ProcessGroup | None
) -> None:
    """Replace the forward of experts, in place.

    Args:
        experts: the stacked experts.
        compute: computes the experts of a rank.
        dispatch: maps experts, rows sorted by expert, and rows per expert of all ranks to outputs.
        group: the ranks with the same tokens, if there are several.
    """
    # a submodule, so that a dry run finds it and assumes an even load
    experts.add_module("shardtrain_dispatch", dispatch)
    rows = partial(compute, experts)
    num_experts = next(experts.parameters()).shape[0]
    experts.forward = partial(_forward, rows, dispatch, group, num_experts)  # type: ignore[method-assign]


def _forward(
    rows: Callable[[Tensor, Tensor], Tensor],
    dispatch: nn.Module,
    group: dist.ProcessGroup | None,
    num_experts: int,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Return the weighted sums of the experts' outputs (S, D) (a collective)."""
    num_tokens = hidden_states.size(0)
    x_SD, expert_SK, weights_SK = hidden_states, top_k_index, top_k_weights
    if group is not None:
        x_SD, weights_SK = _OwnPart.apply(x_SD, group), _OwnPart.apply(weights_SK, group)
        expert_SK = _own_part(expert_SK, group)
    top_k = expert_SK.size(-1)
    expert_R = expert_SK.flatten()
    # A stable sort has the same order on every device
    order_R = expert_R.argsort(stable=True)
    inverse_R = inverse_of(order_R)
    x_RD = repeat_and_permute(x_SD, top_k, order_R, inverse_R)
    count_E = expert_R.new_zeros(num_experts).scatter_add_(0, expert_R, torch.ones_like(expert_R))
    out_RD = permute(dispatch(rows, x_RD, count_E), inverse_R, order_R)
    weighted_SKD = out_RD.unflatten(0, (-1, top_k)) * weights_SK.unsqueeze(-1)
    out_SD = weighted_SKD.sum(1).to(hidden_states.dtype)
    if group is not None:
        out_SD = _Gathered.apply(out_SD, group, num_tokens)
    return out_SD  # type: ignore[no-any-return]


def _own_part(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's rows. Ranks may have different numbers of rows."""
    return x.tensor_split(group.size())[group.rank()].contiguous()


def _gather(part: Tensor, group: dist.ProcessGroup, num_rows: int) -> Tensor:
    """All-gather the rows that ``_own_part`` divided among ranks."""
    sizes = [len(chunk) for chunk in torch.empty(num_rows, 0).tensor_split(group.size())]
    # gloo gathers equal sizes only
    padded = part.new_zeros(sizes[0], *part.shape[1:])
    padded[: len(part)] = part
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([chunk[:size] for chunk, size in zip(gathered, sizes, strict=True)])


class _OwnPart(torch.autograd.Function):
    """This rank's rows of a replicated tensor. The gradient has the rows of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.num_rows = x.size(0)
        return _own_part(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _gather(gradients[0], ctx.group, ctx.num_rows), None


class _Gathered(torch.autograd.Function):
    """The rows of all ranks. All ranks have the same gradient, so each keeps that of its rows."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, num_rows: int) -> Tensor:
        ctx.group = group
        return _gather(part, group, num_rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _own_part(gradients[0], ctx.group), None, None
