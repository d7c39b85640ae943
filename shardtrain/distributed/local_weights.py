"""Let a module whose parameters are DTensors compute with plain tensors. Parameter names do not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement


def use_local_weights(
    module: nn.Module,
    gradients: tuple[Placement, ...] | None = None,
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Make ``module.forward`` see the local tensor of each of the module's direct parameters, in place.

    Args:
        module: the module.
        gradients: placements of the ranks' gradients, by default those of the parameter. ``Partial()``
            means that the gradient is the sum over ranks.
        sum_over_ranks: sums the gradient over ranks in backward (a collective). The gradient then has the
            placement of the parameter, and ``gradients`` is not used.
    """
    original_forward = module.forward

    def forward(*inputs: Any, **keywords: Any) -> Any:
        # An instance attribute hides the registered parameter of the same name, which stays registered.
        shadowed = [name for name, parameter in module._parameters.items() if isinstance(parameter, DTensor)]
        for name in shadowed:
            weight = module._parameters[name]
            if sum_over_ranks is None:
                module.__dict__[name] = weight.to_local(grad_placements=gradients)  # type: ignore[union-attr]
            else:
                module.__dict__[name] = local_weight(weight, sum_over_ranks)  # type: ignore[arg-type]
        try:
            return original_forward(*inputs, **keywords)
        finally:
            for name in shadowed:
                del module.__dict__[name]

    module.forward = forward  # type: ignore[method-assign]


def local_weight(weight: DTensor, sum_over_ranks: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return a weight's local tensor.

    Its gradient has the placement of the weight. Not supported by compilers.

    ``sum_over_ranks`` is applied to the gradient of a replicated weight if each rank computes only a part
    of it.
    """
    return _LocalWeight.apply(weight, sum_over_ranks)  # type: ignore[no-any-return]


class _LocalWeight(torch.autograd.Function):
    """A faster version of ``to_local``, whose forward and backward take 100 microseconds per weight."""

    @staticmethod
    def forward(ctx: Any, weight: DTensor, sum_over_ranks: Callable[[Tensor], Tensor] | None) -> Tensor:
        ctx.sum_over_ranks = sum_over_ranks
        ctx.spec = weight._spec
        local = weight._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[DTensor, None]:
        gradient = gradients[0] if ctx.sum_over_ranks is None else ctx.sum_over_ranks(gradients[0])
        # FSDP creates its DTensors this way. The gradient has the placement of the weight.
        return DTensor(gradient.contiguous(), ctx.spec, requires_grad=False), None
