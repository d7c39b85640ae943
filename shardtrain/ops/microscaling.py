"""Linear layers whose products are of numbers in MXFP8 (OCP Microscaling Formats MX specification 1.0).

Blocks of 32 numbers along the summed dimension share one power of two, e8m0: a byte that is an exponent plus 127, and
NaN where it is 255. Numbers are float8 e4m3. A scale is as large as the largest number of its block asks for, by one of
two rules: "floor" is that of the specification, and what then exceeds the largest number of float8 becomes it; "rceil"
is the smallest power of two under which none exceeds it. All three products of a linear layer have both operands in
MX, each along its own summed dimension, which zeros fill up to whole blocks.

Blocks are small, so that no rank has to ask others for their largest numbers: parts of a tensor that are whole blocks
round alike wherever they are. Weights stay what they are, and are rounded again at each use.
Shape suffixes: R rows, I inputs, O outputs; M, K, N of (M, K) (K, N); S blocks of a row, B numbers of a block.
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
"""The rule of scales, and whether products are emulated, by torchao's names."""
_E4M3 = torch.float8_e4m3fn
_LARGEST = 448.0
"""Of e4m3: 1.75 * 2^8."""
_BIAS = 127
_NAN = 255


def scales(amax: Tensor, rule: str) -> Tensor:
    """The shared exponent of blocks of these largest magnitudes, biased, in int32: 0 to 254, or 255 for NaN.

    A block with an infinite number is NaN as well: the guards of a run see it, where the largest number hides it.
    """
    # Exponents are read from bits, since log2 would round at powers of two. A subnormal number has 0 there, as it
    # should: all of them are below the smallest scale
    bits = amax.float().view(torch.int32)
    exponent = (bits >> 23) - 8
    if rule == RCEIL:
        exponent = exponent + ((bits & 0x7FFFFF) > int(0.75 * 2**23)).int()  # more than 1.75 times a power of two
    return torch.where(bits >= 0x7F800000, _NAN, exponent.clamp(min=0))


def to_mx(x_MK: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """A matrix in MX along its rows, filled up to whole blocks: numbers in e4m3 (M, 32 S), scales as bytes (M, S)."""
    missing = -x_MK.size(1) % MX_BLOCK
    if missing:
        x_MK = F.pad(x_MK, (0, missing))
    x_MSB = x_MK.reshape(x_MK.size(0), x_MK.size(1) // MX_BLOCK, MX_BLOCK)
    scale_MS = scales(x_MSB.abs().amax(-1), rule)
    # 2^-k of the exponent k: its own bits are 254 less those of 2^k, and at least 2^-120 since no scale is above 2^120
    inverse_MS = torch.where(scale_MS == _NAN, math.nan, ((2 * _BIAS - scale_MS) << 23).view(torch.float32))
    scaled_MSB = x_MSB * inverse_MS.to(x_MSB.dtype)[..., None]
    # not all versions of PyTorch and not all devices round to the largest number what is above it
    bits_MSB = scaled_MSB.clamp(-_LARGEST, _LARGEST).to(_E4M3)
    return bits_MSB.reshape(x_MK.shape), scale_MS.to(torch.uint8)


def rounded(x_MK: Tensor, rule: str) -> Tensor:
    """What ``to_mx`` stands for, in the shape and type of ``x``, which holds it but for subnormals of bfloat16."""
    bits_MK, scale_MS = to_mx(x_MK, rule)
    # The exponent's bits make 2^k, but for 2^-127, which is subnormal: half of the smallest number that is not
    power_MS = (scale_MS.int() << 23).clamp(min=0x400000).view(torch.float32)
    bits_MSB = bits_MK.view(*scale_MS.shape, MX_BLOCK)
    out_MK = (bits_MSB.to(x_MK.dtype) * power_MS.to(x_MK.dtype)[..., None]).view(bits_MK.shape)
    return out_MK[:, : x_MK.size(1)]


def swizzled(scale_MS: Tensor) -> Tensor:
    """Scales as cuBLAS reads them ("1D block scaling factors layout" of its documentation), one after the other.

    Tiles of 128 rows and 4 blocks follow each other along a row; in a tile, the bytes of rows 32 apart are together.
    """
    rows, blocks = scale_MS.shape
    tiled = F.pad(scale_MS, (0, -blocks % 4, 0, -rows % 128))
    return tiled.reshape(tiled.size(0) // 128, 4, 32, tiled.size(1) // 4, 4).permute(0, 3, 2, 1, 4).flatten()


def product(a_MK: Tensor, b_NK: Tensor, rule: str, emulate: bool) -> Tensor:
    """``a @ b.T`` (M, N) of two matrices in MX, whose rows are what is summed along."""
    if emulate or not (a_MK.numel() and b_NK.numel()):  # kernels take no empty operands
        return rounded(a_MK, rule) @ rounded(b_NK, rule).t()
    a8_MK, a_scale_MS = to_mx(a_MK, rule)
    b8_NK, b_scale_NS = to_mx(b_NK, rule)
    a_scale, b_scale = (swizzled(scale).view(torch.float8_e8m0fnu) for scale in (a_scale_MS, b_scale_NS))
    # A device takes (M, K) in rows and (K, N) in columns
    return torch._scaled_mm(a8_MK.contiguous(), b8_NK.contiguous().t(), a_scale, b_scale, out_dtype=a_MK.dtype)


class _Linear(torch.autograd.Function):
    """x W^T and its gradients; operands are kept in their own type, and rounded along the sum of each product."""

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
    """``x @ weight.T`` (..., O) of (..., I), in MX, with gradients."""
    out_RO = _Linear.apply(x.reshape(-1, x.size(-1)), weight_OI, rule, emulate)
    return torch.ops.aten._unsafe_view(out_RO, (*x.shape[:-1], weight_OI.size(0)))  # type: ignore[no-any-return]  # as in float8


class MXLinear(QuantizedLinear):
    """A linear layer in MX; parameters and their names are those of ``nn.Linear``. Made by ``convert``."""

    recipe: str

    def multiply(self, x: Tensor, weight_OI: Tensor) -> Tensor:
        """The product as the recipe has it."""
        return linear(x, weight_OI, *RECIPES[self.recipe])

    def extra_repr(self) -> str:
        """As nn.Linear's, with the recipe."""
        return f"{super().extra_repr()}, {self.recipe}"


def convert(module: nn.Linear, recipe: str) -> None:
    """Let a plain linear layer compute in MX, in place; ``recipe`` is one of RECIPES."""
    module.__class__ = MXLinear
    module.recipe = recipe  # type: ignore[assignment]
