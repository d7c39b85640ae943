"""Split linear layers that multiply plain tensors, without the overhead of DTensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardtrain.distributed.local_weights import local_weight


def multiply_local_parts(linear: nn.Linear) -> None:
    """Let a split linear layer compute with plain tensors, in place.

    DTensor decides at each operation, forward and backward, how to compute it on shards, and the kernels chosen for a
    CPU take only plain tensors. Where sequences are gathered and scattered by shared memory, its input and output are
    plain tensors too: a gathered sequence brings its own along, and that of "rowwise" is this rank's features.
    """
    original_forward = linear.forward
    by_outputs = linear.weight.placements == (Shard(0),)  # type: ignore[attr-defined]
    if not by_outputs and linear.weight.placements != (Shard(1),):  # type: ignore[attr-defined]
        return
    partial_sum = (Partial(),)

    def forward(x: Tensor) -> Tensor:
        weight = linear._parameters["weight"]
        bias = linear._parameters.get("bias")
        if not isinstance(weight, DTensor):
            return original_forward(x)
        is_split = isinstance(x, DTensor)
        stays_plain = hasattr(x, "for_local_products") if by_outputs else not is_split
        if stays_plain and by_outputs:
            x_local, gradient = x.for_local_products  # type: ignore[attr-defined]
            if x._backward_hooks or x.retains_grad:  # somebody looks at its gradient, and is to see the whole of it
                x_local = x.to_local(grad_placements=partial_sum)  # type: ignore[attr-defined]
            elif gradient is not None and torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu"):
                bias_O = bias.to_local() if isinstance(bias, DTensor) else None
                return gradient.product(linear, x_local, weight, bias_O)  # type: ignore[no-any-return]
        elif stays_plain:
            x_local = x
        elif is_split and x.placements == ((Replicate(),) if by_outputs else (Shard(x.ndim - 1),)):
            # the gradient of a replicated input is the sum over ranks: each computes a part of it
            x_local = x.to_local(grad_placements=partial_sum if by_outputs else None)
        else:
            return original_forward(x)
        # an instance attribute hides the registered parameter of that name, so forward sees a plain tensor
        linear.__dict__["weight"] = local_weight(weight)
        linear.__dict__["bias"] = bias.to_local() if by_outputs and isinstance(bias, DTensor) else None
        try:
            out = original_forward(x_local)
        finally:
            del linear.__dict__["weight"], linear.__dict__["bias"]
        mesh = weight.device_mesh
        if not by_outputs and isinstance(bias, DTensor):
            # outputs are summed over ranks, so one rank adds the bias; its gradient too is summed over ranks
            out = out + bias.to_local(grad_placements=partial_sum) * float(mesh.get_local_rank() == 0)
        if stays_plain:
            return out
        placement = Shard(out.ndim - 1) if by_outputs else Partial()
        return DTensor.from_local(out, mesh, (placement,), run_check=False)

    linear.forward = forward  # type: ignore[method-assign, assignment]
