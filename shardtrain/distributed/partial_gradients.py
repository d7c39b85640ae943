"""Sum partial gradients over tensor-parallel ranks, if FSDP does not.

A replicated weight has a partial gradient on each rank if the ranks use it for different tokens or heads.
Examples are norms, routers, biases that are added after a sum over ranks, small tables, and one factor of
an adapter.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def sum_over_ranks(parameter: Tensor) -> None:
    """Sum the gradient of a parameter over ranks. It then has the placements of the parameter.

    This is a collective if the gradient is a partial sum, and a no-op if FSDP has already summed it.
    """
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
        parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
