"""Sum partial gradients over tensor-parallel ranks, if FSDP does not.

A replicated weight has partial gradients if ranks compute with different tokens or heads. Examples are
norms, routers, biases that are added after a sum over ranks, small tables, and one factor of an adapter.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def make_whole(parameter: Tensor) -> None:
    """Redistribute the gradient of a parameter to the parameter's own placements.

    A collective if the gradient is a partial sum. A no-op if FSDP has already summed it.
    """
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
        parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
