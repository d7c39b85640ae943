"""Linear layers with products in MXFP8 (OCP Microscaling Formats MX specification 1.0).

Elements are float8 e4m3. A block of 32 elements along the summed dimension shares a scale, which is a
power of two in e8m0: one byte with exponent + 127, or 255 for NaN. A scale depends on the largest element
of its block by one of two rules. "floor" is the rule of the specification: larger elements are clamped to
the largest value of float8. "rceil" is the smallest power of two that clamps no element. Both operands of
all three products of a linear layer are in MX, each with blocks along its own summed dimension. Zeros pad
the last block.

Ranks do not exchange their largest elements, because each rank has complete blocks. Weights are stored in
their own dtype, and rounded at each use. Shape suffixes: R rows, I inputs, O outputs; M, K, N of (M, K)
(K, N); S blocks per row, B elements per block.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.facts.quantization import MX_BLOCK
from shardtrain.ops.float8 import QuantizedLinear

FLOOR = "floor"
RCEIL = "rceil"
RECIPES: dict[str, tuple[str, bool]] = {
    "mxfp8_cublas": (FLOOR, False),
    "mxfp8_cublas_rceil": (RCEIL, False),
    "mxfp8_emulated": (FLOOR, True),
}
"""Rule for the scales, and True if products are emulated, by torchao's name of the recipe."""
_E4M3 = torch.float8_e4m3fn
_LARGEST = 448.0
"""Largest value of e4m3: 1.75 * 2^8."""
_BIAS = 127
_NAN = 255


def scales(amax: Tensor, rule: str) -> Tensor:
    """Return the biased int32 exponents of the scales of blocks with largest magnitude
    ``amax``: 0 to 254, 255 for NaN.

    A block with an infinite element becomes NaN, so the guards of a run detect it. Clamping would hide it.
    """
    # Read the exponent from the bits, because log2 rounds near powers of two. Subnormal values have
    # exponent 0. This is correct, because they are below the smallest scale.
    bits = amax.float().view(torch.int32)
    exponent = (bits >> 23) - 8
    if rule == RCEIL:
        # Round up if the significand of amax exceeds 1.75, the significand of the largest e4m3 value (448).
        exponent = exponent + ((bits & 0x7FFFFF) > int(0.75 * 2**23)).int()
    return torch.where(bits >= 0x7F800000, _NAN, exponent.clamp(min=0))


def to_mx(x_MK: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """Convert a matrix to MX with blocks along its rows: e4m3 elements (M, 32 S) and scales as bytes (M, S).

    Zeros pad the last block of a row.
    """
    missing = -x_MK.size(1) % MX_BLOCK
    if missing:
        x_MK = F.pad(x_MK, (0, missing))
    x_MSB = x_MK.reshape(x_MK.size(0), x_MK.size(1) // MX_BLOCK, MX_BLOCK)
    scale_MS = scales(x_MSB.abs().amax(-1), rule)
    # The biased exponents of 2^k and 2^-k add up to 254. No scale exceeds 2^120, so 2^-k is not subnormal.
    inverse_MS = torch.where(
        scale_MS == _NAN, math.nan, ((2 * _BIAS - scale_MS) << 23).view(torch.float32)
    )
    scaled_MSB = x_MSB * inverse_MS.to(x_MSB.dtype)[..., None]
    # Clamp, because some versions of PyTorch and some devices do not saturate.
    bits_MSB = scaled_MSB.clamp(-_LARGEST, _LARGEST).to(_E4M3)
    return bits_MSB.reshape(x_MK.shape), scale_MS.to(torch.uint8)


def rounded(x_MK: Tensor, rule: str) -> Tensor:
    """Return the values of ``to_mx`` in the shape and dtype of ``x``.

    The conversion is exact, except for subnormal values of bfloat16.
    """
    bits_MK, scale_MS = to_mx(x_MK, rule)
    # Build 2^k from the bits of its exponent. 2^-127 is subnormal, with only the highest bit of the
    # fraction set.
    power_MS = (scale_MS.int() << 23).clamp(min=0x400000).view(torch.float32)
    bits_MSB = bits_MK.view(*scale_MS.shape, MX_BLOCK)
    out_MK = (bits_MSB.to(x_MK.dtype) * power_MS.to(x_MK.dtype)[..., None]).view(bits_MK.shape)
    return out_MK[:, : x_MK.size(1)]


def swizzled(scale_MS: Tensor) -> Tensor:
    """Return scales in the order of cuBLAS,
    flattened ("1D block scaling factors layout" in its documentation).

    Tiles of 128 rows and 4 blocks are consecutive along a row. In a tile, rows at a distance of 32 are
    adjacent.
    """
    rows, blocks = scale_MS.shape
    tiled = F.pad(scale_MS, (0, -blocks % 4, 0, -rows % 128))
    return (
        tiled.reshape(tiled.size(0) // 128, 4, 32, tiled.size(1) // 4, 4)
        .permute(0, 3, 2, 1, 4)
        .flatten()
    )


def product(a_MK: Tensor, b_NK: Tensor, rule: str, emulate: bool) -> Tensor:
    """Return ``a @ b.T`` (M, N) with both matrices in MX along their rows."""
    # Kernels do not support empty operands.
    if emulate or not (a_MK.numel() and b_NK.numel()):
        return rounded(a_MK, rule) @ rounded(b_NK, rule).t()
    a8_MK, a_scale_MS = to_mx(a_MK, rule)
    b8_NK, b_scale_NS = to_mx(b_NK, rule)
    a_scale = swizzled(a_scale_MS).view(torch.float8_e8m0fnu)
    b_scale = swizzled(b_scale_NS).view(torch.float8_e8m0fnu)
    # Devices require (M, K) in row-major and (K, N) in column-major order.
    return torch._scaled_mm(
        a8_MK.contiguous(), b8_NK.contiguous().t(), a_scale, b_scale, out_dtype=a_MK.dtype
    )


class _Linear(torch.autograd.Function):
    """x W^T and its gradients.

    Operands are saved in their own dtype, and converted to MX for each product.
    """

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_OI: Tensor, rule: str, emulate: bool) -> Tensor:
        ctx.save_for_backward(x_RI, weight_OI)
        ctx.rule = rule
        ctx.emulate = emulate
        return product(x_RI, weight_OI, rule, emulate)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (gradient_RO,) = gradients
        x_RI, weight_OI = ctx.saved_tensors
        dx_RI = dweight_OI = None
        if ctx.needs_input_grad[0]:
            dx_RI = product(gradient_RO, weight_OI.t(), ctx.rule, ctx.emulate)
        if ctx.needs_input_grad[1]:
            dweight_OI = product(gradient_RO.t(), x_RI.t(), ctx.rule, ctx.emulate)
        return dx_RI, dweight_OI, None, None


def linear(x: Tensor, weight_OI: Tensor, rule: str, emulate: bool) -> Tensor:
    """Return ``x @ weight.T``, (..., O) for (..., I), in MX. Differentiable."""
    out_RO = _Linear.apply(x.reshape(-1, x.size(-1)), weight_OI, rule, emulate)
    # A view would make FSDP warn, and a network could not modify it in place.
    return torch.ops.aten._unsafe_view(out_RO, (*x.shape[:-1], weight_OI.size(0)))  # type: ignore[no-any-return]


class MXLinear(QuantizedLinear):
    """A linear layer in MX, with the parameters of ``nn.Linear``. ``convert`` creates it."""

    recipe: str

    def multiply(self, x: Tensor, weight_OI: Tensor) -> Tensor:
        """Return the matrix product, with both operands quantized to MX as the recipe specifies."""
        return linear(x, weight_OI, *RECIPES[self.recipe])

    def extra_repr(self) -> str:
        """Return nn.Linear's text with the recipe."""
        return f"{super().extra_repr()}, {self.recipe}"


def convert(module: nn.Linear, recipe: str) -> None:
    """Convert a plain linear layer to MX, in place. ``recipe`` is a key of ``RECIPES``."""
    module.__class__ = MXLinear
    module.recipe = recipe  # type: ignore[assignment]
