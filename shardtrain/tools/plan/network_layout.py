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
    """Return the layout with the experts of a network and, for several tensor-parallel ranks, its split modules."""
    tensor = {}
    plan = model.tensor_plan
    owners = set()
    for path in model.experts:
        is_planned = any(matches(path, pattern) for pattern in plan)
        # Each rank has the matrices of some experts. Without a plan, tensor-parallel ranks have all of them
        if expert_ranks > 1 or tensor_ranks == 1 or is_planned:
            tensor[f"{layout.layers}.{path}"] = "expert"
        owner = path.rpartition(".")[0]
        owners.add(re.sub(r"\.\d+\.", ".*.", owner))
    if tensor_ranks > 1:
        for path, module in model.named_modules():
            style = _STYLES.get(_planned_style(path, plan))
            if style is not None and isinstance(module, nn.Linear | nn.Embedding):
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
