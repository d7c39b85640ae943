"""Expert parallelism for ``transformers`` networks that store their experts as stacked weights.

The network's own router runs unchanged. Only the call of the experts is replaced: tokens are sent to the
ranks of their experts, as in ``expert_parallel``. With tensor parallelism, tokens are replicated at this point.
So each tensor-parallel rank sends only its part of the tokens, and gathers the outputs of all parts.
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
"""Computes experts. Called with the module, rows sorted by expert, and the number of rows for each expert."""


def check(model: Any, config: Config) -> None:
    """Check that a network's experts can be divided among ranks.

    Raises:
        ConfigError: they cannot. The message names the module.
    """
    degree = config.parallelism.expert_parallel_degree
    name = model.config_name
    if not model.experts:
        rule = f"requires a network with experts, and {name} has none"
        separate = _separate_experts(model)
        if separate:
            rule = f"requires experts that use the experts interface of transformers, and {separate} of {name} does not"
        raise ConfigError(Problem(DEGREE, degree, rule, USE_FSDP))
    for path, experts in model.experts.items():
        rule = _broken_rule(path, experts, degree)
        if rule:
            raise ConfigError(Problem(DEGREE, degree, rule, USE_FSDP))


def _broken_rule(path: str, experts: nn.Module, degree: int) -> str:
    """Return the rule that stacked experts violate, or "" if expert parallelism can divide them."""
    parameters = dict(experts.named_parameters())
    first_stack = next(iter(parameters.values()))
    num_experts = first_stack.shape[0]
    if num_experts % degree:
        return f"does not divide the {num_experts} experts of {path}"
    for name in parameters:
        if is_adapter(name):
            return f"is not supported with adapters on the experts of {path}"
    for name, stack in parameters.items():
        is_in_child = "." in name
        if is_in_child or stack.shape[0] != num_experts:
            return f"requires weights with one row per expert, and {path} has other weights too"
    return ""


def _separate_experts(model: nn.Module) -> str:
    """Return the path of the first module whose name or class contains "expert", or "" without such a module."""
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if "expert" in f"{name} {type(module).__name__}".lower():
            return path
    return ""


def give_gradients(part: nn.Module) -> None:
    """Add a gradient for each expert of a ModuleList in every backward pass, zero if no token chose it.

    ``transformers`` 4 only computes the experts that have tokens. Which these are differs between ranks, but FSDP
    must reduce the gradients of the same weights on all ranks. Stacked experts always have a gradient.

    Modifies the model in place. Call it before activation checkpointing and FSDP are applied.
    """
    for path in _lists_of_experts(part):
        block = part.get_submodule(path.rpartition(".")[0])
        block.register_forward_hook(_touch_experts)


def has_lists(part: nn.Module) -> bool:
    """True if a network of ``transformers`` has lists of experts."""
    return hasattr(part, "hf") and bool(_lists_of_experts(part))


def _lists_of_experts(part: nn.Module) -> list[str]:
    paths = []
    for path, module in part.named_modules():
        if not isinstance(module, nn.ModuleList) or not path.endswith(".experts"):
            continue
        first_weight = next(module.parameters(), None)
        if first_weight is not None:
            paths.append(path)
    return paths


def _touch_experts(block: Any, _: Any, output: Any) -> Any:
    """Forward hook of a block with a list of experts. Its first output is that of the experts."""
    is_tuple = isinstance(output, tuple)
    hidden = output[0] if is_tuple else output
    needs_gradients = torch.is_grad_enabled() and hidden.requires_grad
    if not needs_gradients:
        return output

    trained_weights = []
    for weight in block.experts.parameters():
        if weight.requires_grad:
            trained_weights.append(weight)
    hidden = _ZeroGradients.apply(hidden, *trained_weights)
    if is_tuple:
        return (hidden, *output[1:])
    return hidden


class _ZeroGradients(torch.autograd.Function):
    """Identity. Its backward returns zeros for the weights."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *weights: Tensor) -> Tensor:
        ctx.weights = []
        for weight in weights:
            ctx.weights.append((weight.shape, weight.dtype, weight.device))
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        zeros = []
        for shape, dtype, device in ctx.weights:
            # one number in memory, which autograd adds to the gradient of the expert
            zero = torch.zeros((), dtype=dtype, device=device)
            zeros.append(zero.expand(shape))
        return gradients[0], *zeros


def use_dispatch(
    experts: nn.Module, compute: Compute, dispatch: nn.Module, group: dist.ProcessGroup | None
) -> None:
    """Replace the forward of an experts module, in place.

    Args:
        experts: the module.
        compute: computes this rank's experts.
        dispatch: sends rows to the ranks of their experts. Called with a function that computes this rank's
            experts, this rank's rows sorted by expert, and its number of rows for each expert. Returns the
            outputs for these rows.
        group: the tensor-parallel ranks, which hold the same tokens. None without tensor parallelism.
    """
    # Register it as a submodule, because a dry run looks for submodules to assume an even load.
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
    """Return for each token the weighted sum of its experts' outputs, (S, D) (a collective)."""
    num_tokens = hidden_states.size(0)
    x_SD = hidden_states
    expert_SK = top_k_index
    weights_SK = top_k_weights
    if group is not None:
        x_SD = _OwnPart.apply(x_SD, group)
        weights_SK = _OwnPart.apply(weights_SK, group)
        expert_SK = _own_part(expert_SK, group)

    # Sort rows by expert. The sort is stable, to have the same order on every device.
    top_k = expert_SK.size(-1)
    expert_R = expert_SK.flatten()
    order_R = expert_R.argsort(stable=True)
    inverse_R = inverse_of(order_R)
    x_RD = repeat_and_permute(x_SD, top_k, order_R, inverse_R)
    count_E = expert_R.new_zeros(num_experts)
    count_E.scatter_add_(0, expert_R, torch.ones_like(expert_R))

    # Compute the rows on the ranks of their experts, and put the outputs back into the order of tokens.
    sorted_RD = dispatch(rows, x_RD, count_E)
    out_RD = permute(sorted_RD, inverse_R, order_R)
    out_SKD = out_RD.unflatten(0, (-1, top_k))
    weighted_SKD = out_SKD * weights_SK.unsqueeze(-1)
    out_SD = weighted_SKD.sum(1).to(hidden_states.dtype)
    if group is not None:
        out_SD = _Gathered.apply(out_SD, group, num_tokens)
    return out_SD  # type: ignore[no-any-return]


def _own_part(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's rows. Ranks may have different numbers of rows."""
    parts = x.tensor_split(group.size())
    return parts[group.rank()].contiguous()


def _gather(part: Tensor, group: dist.ProcessGroup, num_rows: int) -> Tensor:
    """All-gather the rows that ``_own_part`` divided among ranks."""
    # Each of the first ranks has one row more, because tensor_split divides rows in this way.
    rows_per_rank, num_longer = divmod(num_rows, group.size())
    largest = rows_per_rank + bool(num_longer)

    # Pad, because gloo only gathers tensors of equal size
    padded = part.new_zeros(largest, *part.shape[1:])
    padded[: len(part)] = part
    gathered = []
    for _ in range(group.size()):
        gathered.append(torch.empty_like(padded))
    dist.all_gather(gathered, padded, group=group)

    chunks = []
    for rank, chunk in enumerate(gathered):
        num_rows_of_rank = rows_per_rank + (rank < num_longer)
        chunks.append(chunk[:num_rows_of_rank])
    return torch.cat(chunks)


class _OwnPart(torch.autograd.Function):
    """Select this rank's rows of a replicated tensor. Backward gathers the gradients of all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.num_rows = x.size(0)
        return _own_part(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gathered = _gather(gradients[0], ctx.group, ctx.num_rows)
        return gathered, None


class _Gathered(torch.autograd.Function):
    """Gather the rows of all ranks. The gradient is the same on all ranks, so backward selects own rows."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, num_rows: int) -> Tensor:
        ctx.group = group
        return _gather(part, group, num_rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        own_rows = _own_part(gradients[0], ctx.group)
        return own_rows, None, None
