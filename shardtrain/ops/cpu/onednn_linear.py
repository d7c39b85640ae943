"""Linear layers in float32 by oneDNN, where it multiplies faster on a CPU than the library that PyTorch calls.

PyTorch multiplies float32 by MKL, which on some processors of AMD reaches half of oneDNN's speed. oneDNN's own kernel
is reached by the operator that PyTorch's compiler uses for inference; its backward here is two more of such products,
or one, where the other library is faster for the gradient of the weight, whose factors oneDNN first has to turn.
Shape suffixes: R rows, I inputs, O outputs, x any dimensions before the last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardtrain.ops import chosen_kernels

_SMALLEST_PRODUCT = 1 << 22
"""Multiplications below which setting up oneDNN's kernel takes longer than it saves."""


def is_available() -> bool:
    """Whether this build of PyTorch has the operator."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(x_xI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` (..., O) of two dimensions or more, float32, with gradients; never a view."""
    return _product(x_xI, weight_OI, bias_O)  # type: ignore[no-any-return]


def can_multiply(x: Tensor, weight_OI: Tensor) -> bool:
    """Whether ``product`` is for such factors."""
    # A subclass of Tensor (a DTensor, one of the compiler or of a test) has its own matrix product
    rows = x.numel() // max(x.size(-1), 1)
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and weight_OI.dtype == torch.float32
        and type(x) in (Tensor, nn.Parameter)
        and type(weight_OI) in (Tensor, nn.Parameter)
        and rows * weight_OI.numel() >= _SMALLEST_PRODUCT
        and not torch.is_autocast_enabled("cpu")
        and x.dim() >= 2
    )


def weight_gradient(gradient_RO: Tensor, x_RI: Tensor) -> Tensor:
    """The gradient (O, I) of a weight whose product is ``product``."""
    # Transposing both factors for oneDNN may cost more than its product gains, so that this is measured apart
    by_onednn = chosen_kernels.chosen().uses("onednn_weight_gradient")
    return _product(gradient_RO.t(), x_RI.t(), None) if by_onednn else gradient_RO.t() @ x_RI  # type: ignore[no-any-return]


class OneDnnLinear(nn.Linear):
    """A linear layer that multiplies by oneDNN what is float32, on a CPU, and not small."""

    is_plain_linear = True  # see ``linear_layers.py``

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., I) to (..., O)."""
        if not can_multiply(x, self.weight):
            return super().forward(x)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return product(x, self.weight, self.bias)
        return _linear(x, self.weight, self.bias)  # a few times as fast to call


def use(model: nn.Module) -> None:
    """Let each plain linear layer of a model be one of oneDNN's, in place; names and parameters stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDnnLinear


# An operation of its own, so that a compiler calls it as it is: it cannot lower the one inside
@torch.library.custom_op("shardtrain::onednn_product", mutates_args=())
def _product(x_xI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return _linear(x_xI, weight_OI, bias_O)


def _linear(x_xI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_xI, weight_OI, bias_O, "none", [], "")  # type: ignore[no-any-return]


@_product.register_fake
def _(x_xI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return x_xI.new_empty(*x_xI.shape[:-1], weight_OI.size(0))


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.has_bias = inputs[2] is not None


def _differentiate(ctx: Any, gradient_xO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
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
