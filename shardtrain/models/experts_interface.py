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
    if experts.has_gate:
        gate_and_up_RF = _linear(experts, "gate_up_proj", x_RD, count_E)
        # The network's own gate, which may clamp or interleave
        hidden_RF = experts._apply_gate(gate_and_up_RF)
    else:
        up_RF = _linear(experts, "up_proj", x_RD, count_E)
        hidden_RF = experts.act_fn(up_RF)
    return _linear(experts, "down_proj", hidden_RF, count_E)


def _linear(experts: Any, name: str, x_RI: Tensor, count_E: Tensor) -> Tensor:
    weight_EOI = getattr(experts, name)
    if experts.is_transposed:
        weight_EOI = weight_EOI.transpose(-2, -1)
    out_RO = product(x_RI, count_E, weight_EOI)
    bias_EO = None
    if experts.has_bias:
        bias_EO = getattr(experts, f"{name}_bias")
    return add_bias(out_RO, count_E, bias_EO)
