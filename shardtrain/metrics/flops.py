"""Floating point operations of a training step, counted like in the PaLM paper and torchtitan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from shardtrain.layout import Layout, matches

if TYPE_CHECKING:
    from torch import nn


def flops_per_token(
    num_params_without_embedding: int, num_layers: int, num_heads: int, head_dim: int, seq_len: int
) -> int:
    """Return the FLOPs per token of forward and backward: 6 N + 12 L H head_dim T.

    The formula is from PaLM (arXiv 2204.02311, appendix B). N is the number of parameters without the input
    embedding. In a mixture of experts, only active parameters count. The second term is attention over the
    full square, even if attention is causal. Recomputation is not counted.

    >>> flops_per_token(6_607_343_616, num_layers=32, num_heads=32, head_dim=128, seq_len=2048)
    42865287168
    """
    return 6 * num_params_without_embedding + 12 * num_layers * num_heads * head_dim * seq_len


def count_model(
    model: nn.Module, layout: Layout, model_config: Any
) -> tuple[int, Callable[[int], int]]:
    """Return the number of parameters of an unsharded model, and a function from sequence length to FLOPs per token.

    The input embedding is a lookup without FLOPs, unless it is also the output head. Of the experts, only
    the fraction that a token uses counts (top_k of num_experts). Modules for images do not count: see
    ``RowTask.flops_per_row``. A frozen weight costs 4 FLOPs instead of
    6, because its gradient is not computed. A window or chunk of an attention core limits the attention
    term. Each layer of multi-token prediction also runs the head. The attention term is omitted if the
    model's Config lacks num_layers, num_heads or head_dim. A layer with a recurrence has the
    ``flops_per_token`` of its core instead.
    """
    # Count the parameters with which a token is multiplied: all except the lookup and the experts that the
    # token does not use.
    head: set[int] = set()
    for name in layout.last:
        head.update(map(id, model.get_submodule(name).parameters()))
    not_per_token: list[nn.Parameter] = []
    for name in layout.first:
        for parameter in model.get_submodule(name).parameters():
            # A tied embedding is also the head, which every token is multiplied with.
            if id(parameter) not in head:
                not_per_token.append(parameter)
    # Modules that process images run on patches instead of tokens. Their FLOPs depend on the images.
    for module in getattr(model, "image_modules", {}).values():
        not_per_token += module.parameters()
    total = _numel(model.parameters())
    used = total - _numel(not_per_token)
    used -= _idle_in_experts(model, layout, model_config)
    # Each layer of multi-token prediction also runs the head.
    num_mtp_layers = len(getattr(model, layout.mtp_layers, ()))
    if num_mtp_layers:
        used += num_mtp_layers * _numel(model.get_submodule(layout.last[-1]).parameters())

    # Count how many of the used parameters are frozen: all used ones minus the trained ones.
    frozen = 0
    trained_parameters = [p for p in model.parameters() if p.requires_grad]
    if len(trained_parameters) < len(list(model.parameters())):
        trained = _numel(trained_parameters)
        trained -= _idle_in_experts(model, layout, model_config, trained=True)
        trained -= _numel(p for p in not_per_token if p.requires_grad)
        frozen = used - trained

    # Determine how many tokens a token attends to in each layer. Without named attention cores this is
    # unlimited.
    cores = []
    recurrences = []
    for path, module in model.named_modules():
        if layout.recurrence and matches(path, layout.recurrence):
            recurrences.append(module)
        if layout.context and matches(path, layout.context):
            cores.append(module)
    in_recurrences = sum(int(getattr(core, "flops_per_token", 0)) for core in recurrences)
    num_layers = max(0, int(getattr(model_config, "num_layers", 0)) - len(recurrences))
    num_layers += num_mtp_layers
    num_heads = int(getattr(model_config, "num_heads", 0))
    head_dim = int(getattr(model_config, "head_dim", 0))
    reaches = list(getattr(model_config, "attention_reaches", [])) or [math.inf] * num_layers
    if len(cores) == num_layers:
        reaches = []
        for core in cores:
            # 0 is no limit
            window = getattr(core, "window", 0) or math.inf
            chunk = getattr(core, "chunk", 0) or math.inf
            reaches.append(min(window, chunk))

    def per_token(seq_len: int) -> int:
        attended = int(sum(min(seq_len, reach) for reach in reaches))
        flops = flops_per_token(used, 1, num_heads, head_dim, attended)
        return flops - 2 * frozen + in_recurrences

    return total, per_token


def _numel(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _idle_in_experts(
    model: nn.Module, layout: Layout, model_config: Any, trained: bool = False
) -> int:
    """Return the number of expert parameters that a token does not use.

    With ``trained``, count only trained ones.
    """
    if hasattr(model, "idle_expert_numel"):
        # a network of transformers, whose layout does not name its experts
        return int(model.idle_expert_numel(model_config.top_k, trained))  # type: ignore[operator]
    if not layout.expert:
        return 0
    in_experts = 0
    for path, module in model.named_modules():
        if matches(path, f"{layout.expert}.experts"):
            counted = [p for p in module.parameters() if p.requires_grad or not trained]
            in_experts += _numel(counted)
    used = in_experts * model_config.top_k // model_config.num_experts
    return in_experts - used
