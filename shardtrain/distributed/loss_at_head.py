"""Compute the loss inside the head if this saves memory. The full logits then never exist.

The computation itself is in ops/linear_cross_entropy.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.distributed.mesh import Mesh
from shardtrain.ops.linear_cross_entropy import WORTH_IT_BYTES, saved_bytes
from shardtrain.ops.linear_layers import computes_linear


def saves(model: nn.Module, num_tokens: int, mesh: Mesh, config: Config) -> bool:
    """True if the head can compute the loss of ``num_tokens`` tokens, and this saves at least 256 MiB.

    The model must declare that it returns the output of its module ``head`` unchanged
    (``forward.gives_output_of_head``). The head must be an unsharded linear layer without a bias.
    """
    head = getattr(model, "head", None)
    # The model must declare this, because it could transform the head's output, for example with a soft cap.
    returns_head_output = getattr(type(model).forward, "gives_output_of_head", False)
    if not returns_head_output or mesh.size("tp") > 1:
        return False
    if not isinstance(head, nn.Linear) or not computes_linear(head) or head.bias is not None:
        return False
    element_bytes = getattr(torch, derived.compute_dtype(config)).itemsize
    return (
        saved_bytes(num_tokens, head.in_features, head.out_features, element_bytes)
        >= WORTH_IT_BYTES
    )


@contextmanager
def instead_of_logits(
    model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]
) -> Iterator[None]:
    """Context manager that makes ``model(...)`` return a loss instead of logits.

    The model still calls the head module, because FSDP's hooks on it gather the weight.

    Args:
        loss_of: maps the input of the head and its weight to the loss.
    """
    head: nn.Linear = model.head  # type: ignore[assignment]

    # Look up head.weight at the time of the call, when FSDP has gathered it.
    def loss(input: Tensor) -> Tensor:
        return loss_of(input, head.weight)

    head.forward = loss  # type: ignore[method-assign]
    try:
        yield
    finally:
        del head.forward
