"""The layout of a ``transformers`` network for a plan, from the network on the meta device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from shardtrain.layout import Layout, matches

_STYLES = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "rowwise_split_input": "rowwise",
    "rowwise_rep": "rowwise",
    "colwise_gather_output": "head",
    "colwise_rep": "head",
    "embedding_rowwise": "embed",
}
"""Style of a plan of ``transformers`` -> style in LAYOUT.tensor. Other modules are replicated."""


def of(model: Any, layout: Layout, tensor_ranks: int, expert_ranks: int) -> Layout:
    """Return the layout with the experts of a network, and the modules that its tensor-parallel plan splits."""
    tensor = {}
    plan = model.tensor_plan
    if tensor_ranks > 1 and not plan:
        # Imports DTensor, which takes half a second
        from shardtrain.distributed.tensor_parallel import hf_derived_plan

        plan = hf_derived_plan.derive(model, tensor_ranks)
    owners = set()
    for path in model.experts:
        is_planned = any(matches(path, pattern) for pattern in plan)
        # Each rank has the matrices of some experts. Without a plan, tensor-parallel ranks have all of them
        if expert_ranks > 1 or tensor_ranks == 1 or is_planned:
            tensor[f"{layout.layers}.{path}"] = "expert"
        owner = path.rpartition(".")[0]
        owners.add(re.sub(r"\.\d+\.", ".*.", owner))
    # On one tensor-parallel rank, a plan only states the role of each module
    head = model.hf.get_output_embeddings()
    for path, module in model.named_modules():
        # A norm of the residual stream is a child of a block that only has vectors.
        parent = path.rpartition(".")[0]
        dims = {parameter.ndim for parameter in module.parameters()}
        if parent in model.blocks and dims == {1}:
            tensor[f"{layout.layers}.{path}"] = "sequence"
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        style = _STYLES.get(_planned_style(path, plan))
        if style is None and tensor_ranks == 1 and module is head:
            style = "head"
        if style is not None:
            tensor[path] = style
            tensor[f"{layout.layers}.{path}"] = style
    expert = layout.expert
    if owners:
        expert = f"{layout.layers}.{min(owners)}"
    return replace(layout, tensor=tensor, expert=expert)


def _planned_style(path: str, plan: Mapping[str, str]) -> str:
    """Return the style of the first pattern of a plan that matches, or ""."""
    for pattern, style in plan.items():
        if matches(path, pattern):
            return style
    return ""


def attention_function(model: Any) -> str:
    """Return the name of the attention function of a network, such as "sdpa" or "eager"."""
    return str(getattr(model.hf.config, "_attn_implementation", ""))


def outside_blocks(model: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the paths of the modules with parameters before the blocks (embeddings), and after the blocks."""
    first = []
    last = []
    for path, module in model.named_modules():
        is_in_block = any(f"{path}.".startswith(f"{block}.") for block in model.blocks)
        if is_in_block or next(module.parameters(recurse=False), None) is None:
            continue
        if isinstance(module, nn.Embedding):
            first.append(path)
        else:
            last.append(path)
    return tuple(first), tuple(last)
