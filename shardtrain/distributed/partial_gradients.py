"""Gradients of which each tensor-parallel rank has an addend, where there is no FSDP that adds them up.

A weight that is whole on every rank has such a gradient where ranks compute with other tokens or other heads: norms,
routers, biases after a sum over ranks, small tables, one factor of an adapter.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def make_whole(parameter: Tensor) -> None:
    """Place the gradient of a parameter as the parameter itself is: a collective where it is a sum over ranks.

    FSDP does the same, so that nothing happens where it has.
    """
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
        parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
