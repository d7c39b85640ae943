"""Let a pure module compute with plain tensors where its parameters are DTensors; no name changes."""

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
    """Make ``module.forward`` see this rank's part of each of its own parameters, in place.

    ``gradients`` says how the ranks' gradients make up the whole one (``Partial()``: by their sum); by default they are
    placed as the parameter is. ``sum_over_ranks`` adds them up at once (a collective), in place of what reads the
    gradient; then they are placed as the parameter is.
    """
    whole_forward = module.forward

    def forward(*inputs: Any, **keywords: Any) -> Any:
        # An attribute of the instance hides the registered parameter of the same name, which stays where it is.
        shadowed = [name for name, parameter in module._parameters.items() if isinstance(parameter, DTensor)]
        for name in shadowed:
            weight = module._parameters[name]
            if sum_over_ranks is None:
                module.__dict__[name] = weight.to_local(grad_placements=gradients)  # type: ignore[union-attr]
            else:
                module.__dict__[name] = local_weight(weight, sum_over_ranks)  # type: ignore[arg-type]
        try:
            return whole_forward(*inputs, **keywords)
        finally:
            for name in shadowed:
                del module.__dict__[name]

    module.forward = forward  # type: ignore[method-assign]


def local_weight(weight: DTensor, sum_over_ranks: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """This rank's part of a weight, whose gradient is placed as the weight is; not for a compiler.

    ``sum_over_ranks`` is applied to the gradient of a replicated weight of which each rank computes an addend.
    """
    return _LocalWeight.apply(weight, sum_over_ranks)  # type: ignore[no-any-return]


class _LocalWeight(torch.autograd.Function):
    """``to_local`` with fewer steps: it and its backward took 100 us, and there are as many as weights."""

    @staticmethod
    def forward(ctx: Any, weight: DTensor, sum_over_ranks: Callable[[Tensor], Tensor] | None) -> Tensor:
        ctx.sum_over_ranks = sum_over_ranks
        ctx.spec = weight._spec
        local = weight._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[DTensor, None]:
        gradient = gradients[0] if ctx.sum_over_ranks is None else ctx.sum_over_ranks(gradients[0])
        # as FSDP makes its DTensors: the gradient is placed as the weight is
        return DTensor(gradient.contiguous(), ctx.spec, requires_grad=False), None
