"""A model whose head gives the loss in place of logits, where that saves memory: see ops/linear_cross_entropy.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.distributed.mesh import Mesh
from shardtrain.ops.cross_entropy import ChunkFunction
from shardtrain.ops.linear_cross_entropy import WORTH_IT_BYTES, linear_cross_entropy_sum, saved_bytes
from shardtrain.ops.linear_layers import computes_linear


def saves(model: nn.Module, num_tokens: int, mesh: Mesh, config: Config) -> bool:
    """Whether the head can give the loss, and saves at least 256 MiB by it with so many tokens of a rank at a time.

    It cannot where the model does not say that its output is that of its module ``head``
    (``forward.gives_output_of_head``), and where the head is more than a linear layer or split over ranks.
    """
    head = getattr(model, "head", None)
    if not (
        getattr(type(model).forward, "gives_output_of_head", False)
        and isinstance(head, nn.Linear)
        and computes_linear(head)
        and head.bias is None
        and mesh.size("tp") == 1
    ):
        return False
    element_bytes = getattr(torch, derived.compute_dtype(config)).itemsize
    return saved_bytes(num_tokens, head.in_features, head.out_features, element_bytes) >= WORTH_IT_BYTES


@contextmanager
def in_place_of_logits(
    model: nn.Module, targets_Bt: Tensor, weight: Tensor, chunk: ChunkFunction | None
) -> Iterator[None]:
    """Within it ``model(...)`` is the loss sum of the targets. The head is called as ever: FSDP gathers its weight."""
    head: nn.Linear = model.head  # type: ignore[assignment]

    def loss(input: Tensor) -> Tensor:
        return linear_cross_entropy_sum(input, head.weight, targets_Bt, weight, chunk)

    head.forward = loss  # type: ignore[method-assign]
    try:
        yield
    finally:
        del head.forward
