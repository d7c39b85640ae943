"""Compare the backward pass of single modules with float64, on the inputs and output gradients of a run.

The gradient of an input is the sum over all modules that read it. So a module that is compared reads a view of
its input, and a hook on the view sees only the gradient of this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardtrain.tools.verify import casts, promised_precision
from shardtrain.tools.verify.rounding_limits import Excess, deviation, distance

FEW_NUMBERS = 2
"""Numbers of a small gradient that may be near ties."""


def with_separate_inputs(module: nn.Module, positional: Any, named: Any) -> Any:
    """Return the inputs of a module as views, if its backward pass is compared. Otherwise return them unchanged."""
    if not isinstance(module, promised_precision.ON_EACH_TOKEN):
        return positional, named
    return tree_map_only(Tensor, _view_of, (positional, named))


def _view_of(tensor: Tensor) -> Tensor:
    # The subclasses of the engine, such as DTensor, have attributes that a view would lose.
    if type(tensor) is not Tensor or not tensor.requires_grad:
        return tensor
    if hasattr(tensor, "for_local_products"):
        return tensor
    return tensor.view_as(tensor)


def exact_gradients(
    module: nn.Module, weights: Mapping[str, Tensor], x: Tensor, gradient: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the gradients of the input and of the weights in float64, for an input and an output gradient."""
    leaf = x.detach().double().requires_grad_()
    leaves = {}
    for name, weight in weights.items():
        leaves[name] = weight.detach().double().requires_grad_()
    with casts.off(torch.float64), torch.enable_grad():
        output = torch.func.functional_call(module, leaves, (leaf,))
        of_input, *of_weights = torch.autograd.grad(
            output, (leaf, *leaves.values()), gradient.double()
        )
    return of_input, dict(zip(leaves, of_weights, strict=True))


def excess_of(path: str, what: str, actual: Tensor, exact: Tensor) -> Iterator[Excess]:
    """Compare a gradient that is computed in float32 and rounded to its dtype once. Yield an excess, if any."""
    if actual.shape != exact.shape or not actual.numel():
        return
    error = distance(actual.double(), exact)
    if actual.element_size() >= 4:
        compared = deviation(actual, exact, 1, is_by_row=False, promised=torch.float32)
        if not compared.is_rounding:
            cause = "the backward pass computes in a shorter dtype than float32"
            yield Excess(path, what, compared.error, compared.allowed, cause)
        return
    fraction = promised_precision.fraction_not_rounded_once(actual, exact)
    allowed = max(promised_precision.ROUNDED_ONCE, FEW_NUMBERS / actual.numel())
    if fraction <= allowed:
        return
    dtype = str(actual.dtype).removeprefix("torch.")
    cause = (
        f"the backward pass computes in {dtype} instead of float32, or rounds to it more than once: "
        f"{fraction:.0%} of the numbers are not the exact gradient, rounded once"
    )
    nearest = torch.empty_like(actual).copy_(exact).double()
    yield Excess(path, what, error, distance(nearest, exact), cause)
