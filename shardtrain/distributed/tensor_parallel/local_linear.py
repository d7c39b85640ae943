"""Split linear layers that multiply plain tensors, without the overhead of DTensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardtrain.distributed.local_weights import local_weight


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
    partial_sum = (Partial(),)

    def forward(x: Tensor) -> Tensor:
        weight = linear._parameters["weight"]
        bias = linear._parameters.get("bias")
        if not isinstance(weight, DTensor):
            return original_forward(x)

        # Find the local input. The output is plain if sequences are exchanged through shared memory.
        is_dtensor = isinstance(x, DTensor)
        stays_plain = hasattr(x, "for_local_products") if splits_outputs else not is_dtensor
        if stays_plain and splits_outputs:
            x_local, gradient = x.for_local_products  # type: ignore[attr-defined]
            # A hook on the input must see the complete gradient, which only the DTensor provides.
            if x._backward_hooks or x.retains_grad:
                x_local = x.to_local(grad_placements=partial_sum)  # type: ignore[attr-defined]
            elif (
                gradient is not None
                and torch.is_grad_enabled()
                and not torch.is_autocast_enabled("cpu")
            ):
                bias_O = bias.to_local() if isinstance(bias, DTensor) else None
                return gradient.product(linear, x_local, weight, bias_O)  # type: ignore[no-any-return]
        elif stays_plain:
            x_local = x
        elif is_dtensor and splits_outputs and x.placements == (Replicate(),):
            # Each rank computes only part of the gradient of a replicated input, so it is summed over ranks.
            x_local = x.to_local(grad_placements=partial_sum)
        elif is_dtensor and not splits_outputs and x.placements == (Shard(x.ndim - 1),):
            x_local = x.to_local()
        else:
            # DTensor must redistribute any other input first.
            return original_forward(x)

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
            local_bias = bias.to_local(grad_placements=partial_sum)
            is_first = mesh.get_local_rank() == 0
            out = out + local_bias * float(is_first)
        if stays_plain:
            return out
        placement = Shard(out.ndim - 1) if splits_outputs else Partial()
        return DTensor.from_local(out, mesh, (placement,), run_check=False)

    linear.forward = forward  # type: ignore[method-assign, assignment]
