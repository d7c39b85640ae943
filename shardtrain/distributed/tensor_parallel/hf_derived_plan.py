"""Derive a tensor-parallel plan from the structure of a network's blocks, if ``transformers`` has none for it.

Some older architectures (OPT, StableLM) have no plan but usual layers: ``q_proj``, ``k_proj``, ``v_proj`` and
an output projection in attention, and linear layers with known names in the feed-forward part. Their
attention stores its numbers of heads as attributes, which are divided by the number of ranks. A plan is
derived only if attention has no other weights, and if a copy of the network with the sizes of one rank runs
on the meta device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from shardtrain.distributed.tensor_parallel.meta_pass import MetaPass
from shardtrain.ops.meta_autocast import meta_autocast
from shardtrain.ops.user_state import trial

HEAD_COUNTS = ("num_heads", "num_key_value_heads")
_INPUTS = {"q_proj", "k_proj", "v_proj"}
_OUTPUTS = ("o_proj", "out_proj")
_FEED_FORWARD = (({"gate_proj", "up_proj"}, "down_proj"), ({"fc1"}, "fc2"))
"""(Names of the layers with split outputs, name of the layer with split inputs)."""
_TOKENS = 4


def derive(model: Any, ranks: int) -> dict[str, str]:
    """Return module path -> style, or an empty dictionary if the network does not have the usual structure."""
    plan: dict[str, str] = {}
    for block_path, block in model.blocks.items():
        attention = dict(_attention(block_path, block))
        feed_forward = dict(_feed_forward(block_path, block))
        if not attention or not feed_forward:
            return {}
        plan |= attention | feed_forward
    ends = (
        (model.hf.get_input_embeddings(), "embedding_rowwise"),
        (model.hf.get_output_embeddings(), "colwise_gather_output"),
    )
    paths = {module: path for path, module in model.named_modules()}
    plan |= {paths[module]: style for module, style in ends if module is not None}
    return plan if _runs_in_parts(model, plan, ranks) else {}


def split_attention(model: nn.Module, plan: dict[str, str]) -> list[nn.Module]:
    """Return the attention modules whose layers a derived plan splits."""
    owners = {path.rpartition(".")[0] for path in plan if path.endswith("q_proj")}
    return [module for path, module in model.named_modules() if path in owners]


def divide_heads(attention: nn.Module, ranks: int) -> None:
    """Divide the attributes with numbers of heads by the number of ranks, in place."""
    for name in HEAD_COUNTS:
        count = getattr(attention, name, None)
        if isinstance(count, int):
            setattr(attention, name, count // ranks)


def _linear_children(module: nn.Module) -> set[str]:
    return {name for name, child in module.named_children() if isinstance(child, nn.Linear)}


def _attention(block_path: str, block: nn.Module) -> Iterator[tuple[str, str]]:
    for path, module in block.named_modules(prefix=block_path):
        outputs = [name for name in _OUTPUTS if name in _linear_children(module)]
        known = _INPUTS | set(outputs)
        if _linear_children(module) != known or len(outputs) != 1:
            continue
        # Reject other weights, such as one norm per head: some of their numbers could belong to heads of
        # other ranks.
        owners = {name.partition(".")[0] for name, _ in module.named_parameters()}
        if owners - known or not isinstance(getattr(module, "num_heads", None), int):
            continue
        for name in sorted(_INPUTS):
            yield f"{path}.{name}", "colwise"
        yield f"{path}.{outputs[0]}", "rowwise"


def _feed_forward(block_path: str, block: nn.Module) -> Iterator[tuple[str, str]]:
    for path, module in block.named_modules(prefix=block_path):
        for inputs, output in _FEED_FORWARD:
            if _linear_children(module) != inputs | {output}:
                continue
            for name in sorted(inputs):
                yield f"{path}.{name}", "colwise"
            yield f"{path}.{output}", "rowwise"


def _runs_in_parts(model: Any, plan: dict[str, str], ranks: int) -> bool:
    """True if the network's forward runs with the local sizes of one rank.

    Sizes that are not multiples of the number of ranks are checked later.
    """
    copied = copy.deepcopy(model).to("meta")
    for path, style in plan.items():
        linear = copied.get_submodule(path)
        if style not in ("colwise", "rowwise"):
            continue
        inputs = linear.in_features
        outputs = linear.out_features
        if inputs % ranks or outputs % ranks:
            return True
        # Replace the layer by one rank's part of it.
        if style == "colwise":
            outputs //= ranks
        else:
            inputs //= ranks
        has_bias = linear.bias is not None
        copied.set_submodule(path, nn.Linear(inputs, outputs, has_bias, device="meta"))
    for attention in split_attention(copied, plan):
        divide_heads(attention, ranks)
    tokens = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    with (
        suppress(Exception),
        trial(copied),
        torch.no_grad(),
        torch.device("meta"),
        meta_autocast(),
        MetaPass(),
    ):
        copied(tokens)
        return True
    return False
