"""Linear layers in float32 with oneDNN, for CPUs where it is faster than PyTorch's library.

PyTorch multiplies float32 with MKL, which has half the speed of oneDNN on some AMD processors. This
module calls oneDNN through the operator that PyTorch's compiler uses for inference. The backward pass
calls it for the gradient of the input, and also for the gradient of the weight unless MKL is faster
there: oneDNN must transpose these factors first. Shape suffixes: R rows, I inputs, O outputs, x any
dimensions before the last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardtrain.ops import chosen_kernels

_SMALLEST_PRODUCT = 1 << 22
"""Minimum number of multiplications. For smaller products, the call of oneDNN takes longer than it saves."""


def is_available() -> bool:
    """True if this build of PyTorch has the operator."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(x_xI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``, (..., O) in float32.

    Differentiable. ``x`` must have at least two dimensions.
    """
    return _product(x_xI, weight_OI, bias_O)  # type: ignore[no-any-return]


def can_multiply(x: Tensor, weight_OI: Tensor) -> bool:
    """True if ``product`` supports these factors and they are large enough."""
    if x.device.type != "cpu" or x.dim() < 2 or torch.is_autocast_enabled("cpu"):
        return False
    if x.dtype != torch.float32 or weight_OI.dtype != torch.float32:
        return False
    # Subclasses of Tensor, such as DTensor, implement their own matrix product.
    if type(x) not in (Tensor, nn.Parameter) or type(weight_OI) not in (Tensor, nn.Parameter):
        return False
    rows = x.numel() // max(x.size(-1), 1)
    return rows * weight_OI.numel() >= _SMALLEST_PRODUCT


def weight_gradient(gradient_RO: Tensor, x_RI: Tensor) -> Tensor:
    """Return the gradient (O, I) of the weight of ``product``."""
    # oneDNN must transpose both factors, which may take longer than it saves. It is therefore measured
    # separately.
    if chosen_kernels.chosen().uses("onednn_weight_gradient"):
        return _product(gradient_RO.t(), x_RI.t(), None)  # type: ignore[no-any-return]
    return gradient_RO.t() @ x_RI


class OneDnnLinear(nn.Linear):
    """A linear layer that uses oneDNN for large float32 products on a CPU."""

    is_plain_linear = True
    """Read by ``linear_layers.py``."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., I) to (..., O)."""
        if not can_multiply(x, self.weight):
            return super().forward(x)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return product(x, self.weight, self.bias)
        # Without gradients, call the operator directly, which has less overhead.
        return _linear(x, self.weight, self.bias)


def use(model: nn.Module) -> None:
    """Replace each ``nn.Linear`` with its oneDNN version, in place.

    Parameters and their names are unchanged.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDnnLinear


# Register a custom operation, which compilers call without changes.
# They cannot lower the operator that it calls.
@torch.library.custom_op("shardtrain::onednn_product", mutates_args=())
def _product(x_xI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return _linear(x_xI, weight_OI, bias_O)


def _linear(x_xI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_xI, weight_OI, bias_O, "none", [], "")  # type: ignore[no-any-return]


@_product.register_fake
def _(x_xI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return x_xI.new_empty(*x_xI.shape[:-1], weight_OI.size(0))


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    x, weight_OI, bias_O = inputs
    ctx.save_for_backward(x, weight_OI)
    ctx.has_bias = bias_O is not None


def _differentiate(
    ctx: Any, gradient_xO: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x_xI, weight_OI = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad
    dx_xI = dweight_OI = dbias_O = None
    if needs_x:
        dx_xI = _product(gradient_xO, weight_OI.t(), None)
    gradient_RO = gradient_xO.flatten(0, -2)
    if needs_weight:
        dweight_OI = weight_gradient(gradient_RO, x_xI.flatten(0, -2))
    if ctx.has_bias and needs_bias:
        dbias_O = gradient_RO.sum(0)
    return dx_xI, dweight_OI, dbias_O


_product.register_autograd(_differentiate, setup_context=_save)
