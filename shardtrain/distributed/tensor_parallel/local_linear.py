"""Split linear layers that multiply plain tensors, without the overhead of DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardtrain.distributed.local_weights import local_weight

_SUMMED = (Partial(),)
"""Placement of a gradient of which each rank has a part of the sum."""


def multiply_local_parts(linear: nn.Linear) -> None:
    """Make a split linear layer multiply with this rank's part of its weight as a plain tensor, in place.

    This is faster, because DTensor decides for each operation in forward and backward how to compute it on
    shards. It is also necessary for CPU kernels, which support only plain tensors.

    If ranks exchange sequences through shared memory, the layer's input and output are plain tensors too. A
    gathered sequence has a plain copy in its attribute ``for_local_products``. The input of a "rowwise" layer
    contains only this rank's features.
    """
    original_forward = linear.forward
    splits_outputs = linear.weight.placements == (Shard(0),)  # type: ignore[attr-defined]
    if not splits_outputs and linear.weight.placements != (Shard(1),):  # type: ignore[attr-defined]
        return

    def forward(x: Tensor) -> Tensor:
        weight = linear._parameters["weight"]
        bias = linear._parameters.get("bias")
        if not isinstance(weight, DTensor):
            return original_forward(x)
        x_local = _local_columns(x) if splits_outputs else _local_rows(x)
        if x_local is None:
            # DTensor must redistribute the input first.
            return original_forward(x)

        # The output is plain if sequences are exchanged through shared memory.
        stays_plain = not isinstance(x, DTensor)
        if splits_outputs:
            stays_plain = hasattr(x, "for_local_products")
        gradient = _sequence_gradient(x) if splits_outputs else None
        if gradient is not None:
            bias_O = bias.to_local() if isinstance(bias, DTensor) else None
            return gradient.product(linear, x_local, weight, bias_O)  # type: ignore[no-any-return]

        # Hide each parameter behind an instance attribute of the same name, so forward sees a plain tensor.
        linear.__dict__["weight"] = local_weight(weight)
        linear.__dict__["bias"] = (
            bias.to_local() if splits_outputs and isinstance(bias, DTensor) else None
        )
        try:
            out = original_forward(x_local)
        finally:
            del linear.__dict__["weight"], linear.__dict__["bias"]

        # Outputs are summed over ranks, so only one rank may add the bias. The others multiply it by 0, and
        # its gradient is summed over ranks.
        mesh = weight.device_mesh
        if not splits_outputs and isinstance(bias, DTensor):
            local_bias = bias.to_local(grad_placements=_SUMMED)
            is_first = mesh.get_local_rank() == 0
            out = out + local_bias * float(is_first)
        if stays_plain:
            return out
        placement = Shard(out.ndim - 1) if splits_outputs else Partial()
        return DTensor.from_local(out, mesh, (placement,), run_check=False)

    linear.forward = forward  # type: ignore[method-assign, assignment]


def _local_columns(x: Tensor) -> Tensor | None:
    """Return the local input of a layer whose outputs are split, or None if DTensor must redistribute it."""
    if hasattr(x, "for_local_products"):
        x_local, _ = x.for_local_products
        if not _is_watched(x):
            return x_local  # type: ignore[no-any-return]
    elif not isinstance(x, DTensor) or x.placements != (Replicate(),):
        return None
    # Each rank computes only part of the gradient of a replicated input, so it is summed over ranks.
    return x.to_local(grad_placements=_SUMMED)  # type: ignore[no-any-return, attr-defined]


def _local_rows(x: Tensor) -> Tensor | None:
    """Return the local input of a layer whose inputs are split, or None if DTensor must redistribute it."""
    if not isinstance(x, DTensor):
        return x
    if x.placements != (Shard(x.ndim - 1),):
        return None
    return x.to_local()


def _sequence_gradient(x: Tensor) -> Any | None:
    """Return the object that computes the product and the gradient of a gathered sequence, if it is needed."""
    if not hasattr(x, "for_local_products") or _is_watched(x):
        return None
    if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return None
    _, gradient = x.for_local_products
    return gradient


def _is_watched(x: Tensor) -> bool:
    """True if a hook must see the complete gradient of the input, which only the DTensor provides."""
    return bool(x._backward_hooks) or x.retains_grad
