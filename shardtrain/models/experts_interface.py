"""Stacked experts of ``transformers`` networks: modules that its experts interface (``ALL_EXPERTS_FUNCTIONS``) runs.

Such a module gets tokens, the experts that the router chose, and their weights. Its weights are stacks whose dim 0 is
the expert. ``compute`` is the part of that interface that expert parallelism needs: rows that are sorted by expert.
Shape suffixes: R rows, D model, F feed-forward, E experts, I and O inputs and outputs of a product.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardtrain.models.moe import add_bias, product

_FACTS = ("has_gate", "has_bias", "is_transposed", "_apply_gate")
"""Attributes that ``use_experts_implementation`` of ``transformers`` sets on each module of the interface."""


def is_experts(module: nn.Module) -> bool:
    """True if the experts interface of ``transformers`` runs the module."""
    return all(hasattr(module, name) for name in _FACTS)


def compute(experts: Any, x_RD: Tensor, count_E: Tensor) -> Tensor:
    """Return the outputs (R, D) of rows (R, D) that are sorted by expert, without the weights of the router.

    ``count_E`` is the number of rows for each expert of this rank.
    """
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    hidden_RF = _linear(experts, name, x_RD, count_E)
    hidden_RF = experts._apply_gate(hidden_RF) if experts.has_gate else experts.act_fn(hidden_RF)
    return _linear(experts, "down_proj", hidden_RF, count_E)


def _linear(experts: Any, name: str, x_RI: Tensor, count_E: Tensor) -> Tensor:
    weight_EOI = getattr(experts, name)
    if experts.is_transposed:
        weight_EOI = weight_EOI.transpose(-2, -1)
    bias_EO = getattr(experts, f"{name}_bias") if experts.has_bias else None
    return add_bias(product(x_RI, count_E, weight_EOI), count_E, bias_EO)
