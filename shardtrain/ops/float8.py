"""Linear layers with products in float8 (Micikevicius et al. 2022) and dynamic scales.

An operand is scaled so its largest element fits, and rounded to float8. The product is divided by
both scales. There is one scale per tensor ("tensorwise"), or one per row of the left operand and
per column of the right one ("rowwise"). Scales are powers of two, rounded down. They only change
exponents, so the rounding of an element only depends on other elements if it is below about 2^-14
of the largest. Ranks with different tokens or columns of a weight therefore round equally without
exchanging their largest elements.

Weights are stored in their own dtype and rounded at each use. With ``emulate``, rounded operands
are multiplied in their own dtype, which represents all float8 values. It has the same results on
any device, but is slower.
Shape suffixes: R rows, P rows with padding between experts, I inputs, O outputs, E experts; M, K, N
of (M, K) (K, N).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.nn import functional as F

from shardtrain.facts.quantization import FLOAT8_MULTIPLE

E4M3 = "e4m3"
E5M2 = "e5m2"
_MAX_POWER = 63
"""Largest exponent of a scale. The product of the inverses of two such scales is still a normal float32."""

Operand = tuple[str, bool]
"""Format of an operand, and True if it has one scale per row (or column) instead of one per tensor."""
_Products = tuple[tuple[Operand, Operand], tuple[Operand, Operand], tuple[Operand, Operand] | None]
RECIPES: dict[str, _Products] = {
    "tensorwise": (
        ((E4M3, False), (E4M3, False)),
        ((E5M2, False), (E4M3, False)),
        ((E5M2, False), (E4M3, False)),
    ),
    "rowwise": (
        ((E4M3, True), (E4M3, True)),
        ((E4M3, True), (E4M3, True)),
        ((E4M3, True), (E4M3, True)),
    ),
    "rowwise_with_gw_hp": (((E4M3, True), (E4M3, True)), ((E4M3, True), (E4M3, False)), None),
}
"""Operands of the three products of a linear layer, x W^T, g W and g^T x, for each recipe.

They are equal to torchao's recipes of the same names. None computes g^T x in the dtype of its operands.
Gradients with one scale require the range of e5m2.
"""

Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function of rows (R, I) sorted by expert, rows per expert (E,) and weights (E, O, I). Returns (R, O)."""


def dtype_of(name: str) -> torch.dtype:
    """Return PyTorch's dtype of a format on this device.

    AMD's MI300 has separate formats without negative zero.
    """
    is_mi300 = False
    if torch.version.hip and torch.cuda.is_available():
        is_mi300 = "gfx94" in torch.cuda.get_device_properties(0).gcnArchName
    if name == E4M3:
        return torch.float8_e4m3fnuz if is_mi300 else torch.float8_e4m3fn
    return torch.float8_e5m2fnuz if is_mi300 else torch.float8_e5m2


def powers(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest exponents k <= 63, int32, with amax 2^k <= the largest value of ``dtype``."""
    # The largest value is fraction 2^exponent: 448 = 0.875 * 2^9. The exponent of amax is read from
    # its bits, because log2 rounds near powers of two. If amax has a larger fraction than the
    # largest value, k is one less.
    fraction, exponent = math.frexp(torch.finfo(dtype).max)
    bits = amax.float().view(torch.int32)
    exceeds = (bits & 0x7FFFFF) > int((2 * fraction - 1) * 2**23)
    exponent_of_amax = (bits >> 23) - 127
    power = exponent - 1 - exponent_of_amax - exceeds.int()
    return power.clamp(max=_MAX_POWER)


def two_to_the(power: Tensor) -> Tensor:
    """Return 2^k for int32 exponents k, exactly, in float32."""
    return ((power + 127) << 23).view(torch.float32)


def to_float8(
    x: Tensor, dim: int | None, name: str, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return a tensor in float8, and the float32 powers of two that restore its magnitude.

    Elements along ``dim`` share a scale. If ``dim`` is None, all elements share a scale. ``amax`` is their
    largest magnitude, if known. If an element is not finite, all elements with its scale become NaN.
    """
    dtype = dtype_of(name)
    if amax is None:
        amax = _largest(x, dim)
    power = powers(amax, dtype)
    scale = torch.where(torch.isfinite(amax), two_to_the(power), math.nan)
    return (x * scale.to(x.dtype)).to(dtype), two_to_the(-power)


def _largest(x: Tensor, dim: int | None) -> Tensor:
    """Return the largest magnitude along ``dim``, or of all elements. 0 for an empty tensor."""
    if x.numel() == 0:
        return x.new_zeros(()) if dim is None else x.sum(dim, keepdim=True)
    return x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)


def rounded(x: Tensor, dim: int | None, name: str, amax: Tensor | None = None) -> Tensor:
    """Return the values of ``to_float8`` in the dtype of ``x``. The conversion is exact."""
    bits, inverse = to_float8(x, dim, name, amax)
    return bits.to(x.dtype) * inverse.to(x.dtype)


def product(
    a_MK: Tensor, b_KN: Tensor, kinds: tuple[Operand, Operand], emulate: bool, fast: bool = False
) -> Tensor:
    """Return the product (M, N) of two matrices in float8.

    ``fast`` allows a device to accumulate with fewer bits, which is usual in forward passes.
    """
    (a_name, a_rows), (b_name, b_rows) = kinds
    a_dim = 1 if a_rows else None
    b_dim = 0 if b_rows else None
    if emulate:
        return rounded(a_MK, a_dim, a_name) @ rounded(b_KN, b_dim, b_name)
    a8_MK, a_inverse = to_float8(a_MK, a_dim, a_name)
    b8_KN, b_inverse = to_float8(b_KN, b_dim, b_name)

    # Devices require (M, K) in row-major and (K, N) in column-major order, and K to be a multiple
    # of 16: pad with zeros.
    a8_MK = a8_MK.contiguous()
    b8_NK = b8_KN.t().contiguous()
    missing = -a8_MK.size(1) % FLOAT8_MULTIPLE
    if missing:
        # Padding is not implemented for float8. Pad the bytes: the byte 0 is the value 0.
        a8_MK, b8_NK = (
            F.pad(x8.view(torch.uint8), (0, missing)).view(x8.dtype) for x8 in (a8_MK, b8_NK)
        )
    b8_KN = b8_NK.t()

    options: dict[str, Any] = {"out_dtype": a_MK.dtype, "use_fast_accum": fast}
    if not (a_rows or b_rows):
        return torch._scaled_mm(a8_MK, b8_KN, a_inverse, b_inverse, **options)
    # The kernel with a scale per row only returns bfloat16.
    if fast and a_rows and b_rows and a_MK.dtype == torch.bfloat16:
        return torch._scaled_mm(a8_MK, b8_KN, a_inverse, b_inverse, **options)
    # That kernel is slow without fast accumulation. Scales that are powers of two can be applied
    # afterwards, exactly.
    one = torch.ones((), dtype=torch.float32, device=a_MK.device)
    out_MN = torch._scaled_mm(a8_MK, b8_KN, one, one, **options)
    return out_MN * a_inverse.to(out_MN.dtype) * b_inverse.to(out_MN.dtype)


class _Linear(torch.autograd.Function):
    """x W^T and its gradients. Operands are saved in their own dtype, and rounded for each product."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_OI: Tensor, recipe: str, emulate: bool) -> Tensor:
        ctx.save_for_backward(x_RI, weight_OI)
        ctx.recipe = recipe
        ctx.emulate = emulate
        return product(x_RI, weight_OI.t(), RECIPES[recipe][0], emulate, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (gradient_RO,) = gradients
        x_RI, weight_OI = ctx.saved_tensors
        _, of_input, of_weight = RECIPES[ctx.recipe]
        dx_RI = dweight_OI = None
        if ctx.needs_input_grad[0]:
            dx_RI = product(gradient_RO, weight_OI, of_input, ctx.emulate)
        if ctx.needs_input_grad[1]:
            if of_weight is None:
                dweight_OI = gradient_RO.t() @ x_RI
            else:
                dweight_OI = product(gradient_RO.t(), x_RI, of_weight, ctx.emulate)
        return dx_RI, dweight_OI, None, None


def linear(x: Tensor, weight_OI: Tensor, recipe: str, emulate: bool) -> Tensor:
    """Return ``x @ weight.T``, (..., O) for (..., I), in float8 by a recipe of RECIPES. Differentiable."""
    out_RO = _Linear.apply(x.reshape(-1, x.size(-1)), weight_OI, recipe, emulate)
    # A view would make FSDP warn, and a network could not modify it in place.
    return torch.ops.aten._unsafe_view(out_RO, (*x.shape[:-1], weight_OI.size(0)))  # type: ignore[no-any-return]


class QuantizedLinear(nn.Linear):
    """Base of linear layers with a low-precision product, which subclasses implement in ``multiply``."""

    @abstractmethod
    def multiply(self, x: Tensor, weight_OI: Tensor) -> Tensor:
        """Map (..., I) to (..., O) without the bias. The arguments are not DTensors."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., I) to (..., O). With tensor parallelism each rank multiplies its part of the weight."""
        if isinstance(self.weight, DTensor):
            return self._split(x)
        out = self.multiply(x, self.weight)
        return out if self.bias is None else out + self.bias

    def _split(self, x: Tensor) -> Tensor:
        weight = self.weight
        mesh = weight.device_mesh  # type: ignore[attr-defined]
        assert isinstance(weight, DTensor) and isinstance(x, DTensor)
        (placement,) = weight.placements
        partial: tuple[Placement, ...] = (Partial(),)

        # Column-wise: a rank has some of the outputs, and the gradient of the input is a sum over ranks.
        if placement.is_shard(0):
            x_local = x.to_local(grad_placements=partial)
            out = self.multiply(x_local, weight.to_local())
            if self.bias is not None:
                out = out + self.bias.to_local()  # type: ignore[attr-defined]
            return DTensor.from_local(out, mesh, (Shard(out.ndim - 1),), run_check=False)

        # Row-wise: the output is a sum over ranks, so only one rank adds the bias.
        out = self.multiply(x.to_local(), weight.to_local())
        if self.bias is not None:
            is_first = float(mesh.get_local_rank() == 0)
            out = out + self.bias.to_local(grad_placements=partial) * is_first  # type: ignore[attr-defined]
        return DTensor.from_local(out, mesh, partial, run_check=False)


class Float8Linear(QuantizedLinear):
    """A linear layer in float8, with the parameters of ``nn.Linear``. ``convert`` creates it."""

    recipe: str
    emulate: bool

    def multiply(self, x: Tensor, weight_OI: Tensor) -> Tensor:
        """Return the product in float8 by the recipe."""
        return linear(x, weight_OI, self.recipe, self.emulate)

    def extra_repr(self) -> str:
        """Return nn.Linear's text with the recipe."""
        suffix = ", emulated" if self.emulate else ""
        return f"{super().extra_repr()}, float8 {self.recipe}{suffix}"


def convert(module: nn.Linear, recipe: str, emulate: bool) -> None:
    """Convert a plain linear layer to float8, in place."""
    module.__class__ = Float8Linear
    module.recipe = recipe  # type: ignore[assignment]
    module.emulate = emulate  # type: ignore[assignment]


class _Grouped(torch.autograd.Function):
    """Product of rows and the weights of their experts, and its gradients.

    Operands are e4m3 with scales per row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_RI: Tensor,
        count_E: Tensor,
        weight_EOI: Tensor,
        multiply: Multiply,
        emulate: bool,
    ) -> Tensor:
        ctx.save_for_backward(x_RI, count_E, weight_EOI)
        ctx.multiply = multiply
        ctx.emulate = emulate
        if emulate:
            return multiply(rounded(x_RI, -1, E4M3), count_E, rounded(weight_EOI, -1, E4M3))
        return _grouped_mm(x_RI, count_E, weight_EOI)

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        (gradient_RO,) = gradients
        x_RI, count_E, weight_EOI = ctx.saved_tensors
        dx_RI = dweight_EOI = None
        if ctx.needs_input_grad[0]:
            weight_EIO = weight_EOI.transpose(1, 2)
            if ctx.emulate:
                dx_RI = ctx.multiply(
                    rounded(gradient_RO, -1, E4M3), count_E, rounded(weight_EIO, -1, E4M3)
                )
            else:
                dx_RI = _grouped_mm(gradient_RO, count_E, weight_EIO)
        if ctx.needs_input_grad[2]:
            dweight_EOI = _grouped_outer(gradient_RO, x_RI, count_E, ctx.emulate)
        return dx_RI, None, dweight_EOI, None, None


def grouped_product(
    x_RI: Tensor, count_E: Tensor, weight_EOI: Tensor, multiply: Multiply, emulate: bool
) -> Tensor:
    """Multiply each row (R, I), sorted by expert, by the weight of its expert in float8. Return (R, O).

    Emulation calls ``multiply``, the same product in the dtype of its operands.
    """
    return _Grouped.apply(x_RI, count_E, weight_EOI, multiply, emulate)  # type: ignore[no-any-return]


def _grouped_mm(x_RI: Tensor, count_E: Tensor, weight_EOI: Tensor) -> Tensor:
    """Call the device's grouped product, which requires (E, I, O) in column-major order."""
    x8_RI, x_inverse = to_float8(x_RI, -1, E4M3)
    w8_EOI, w_inverse = to_float8(weight_EOI, -1, E4M3)
    stop_E = count_E.cumsum(0).to(torch.int32)
    w8_EIO = w8_EOI.contiguous().transpose(1, 2)
    out_RO = torch._scaled_grouped_mm(
        x8_RI.contiguous(),
        w8_EIO,
        x_inverse[:, 0],
        w_inverse[:, :, 0].contiguous(),
        stop_E,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return out_RO.to(x_RI.dtype)


def _grouped_outer(gradient_RO: Tensor, x_RI: Tensor, count_E: Tensor, emulate: bool) -> Tensor:
    """Return g^T x of each expert's rows, (E, O, I). There is one scale per column of an expert's rows."""
    expert_R = torch.repeat_interleave(count_E, output_size=x_RI.size(0))
    g_amax_EO = _largest_of_each(gradient_RO, expert_R, count_E.numel())
    x_amax_EI = _largest_of_each(x_RI, expert_R, count_E.numel())
    if emulate:
        g_RO = rounded(gradient_RO, 0, E4M3, g_amax_EO[expert_R])
        x_RI = rounded(x_RI, 0, E4M3, x_amax_EI[expert_R])
        parts = zip(g_RO.split(count_E.tolist()), x_RI.split(count_E.tolist()), strict=True)
        return torch.stack([g.t() @ x for g, x in parts])

    # Devices sum 16 rows at a time. Pad each expert's rows with zeros to a multiple of 16. The
    # total number of rows is an upper bound, because the host does not know the counts.
    padded_E = (count_E + FLOAT8_MULTIPLE - 1) // FLOAT8_MULTIPLE * FLOAT8_MULTIPLE
    stop_E = padded_E.cumsum(0)
    all_rows = -(-x_RI.size(0) // FLOAT8_MULTIPLE) * FLOAT8_MULTIPLE
    rows = all_rows + FLOAT8_MULTIPLE * count_E.numel()
    padding_before_E = (stop_E - padded_E) - (count_E.cumsum(0) - count_E)
    position_R = torch.arange(x_RI.size(0), device=x_RI.device) + padding_before_E[expert_R]

    # Pad and transpose both operands, because the product sums over rows.
    operands = []
    inverses = []
    for x, amax in ((gradient_RO, g_amax_EO), (x_RI, x_amax_EI)):
        x8, _ = to_float8(x, 0, E4M3, amax[expert_R])
        padded = x.new_zeros(rows, x.size(1), dtype=torch.uint8)
        padded.index_copy_(0, position_R, x8.view(torch.uint8))
        operands.append(padded.view(x8.dtype).t().contiguous())
        inverses.append(two_to_the(-powers(amax, x8.dtype)).flatten())
    options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    g8_OP, x8_IP = operands
    g_inverse, x_inverse = inverses
    stop_E = stop_E.to(torch.int32)
    out_EOI = torch._scaled_grouped_mm(g8_OP, x8_IP.t(), g_inverse, x_inverse, stop_E, **options)
    # A device writes arbitrary values for an expert without rows.
    return torch.where((count_E > 0)[:, None, None], out_EOI, 0.0).to(gradient_RO.dtype)


def _largest_of_each(x_RI: Tensor, expert_R: Tensor, experts: int) -> Tensor:
    """Return the largest magnitude of each column among an expert's rows, (E, I)."""
    largest_EI = x_RI.new_zeros(experts, x_RI.size(1))
    return largest_EI.scatter_reduce_(0, expert_R[:, None].expand_as(x_RI), x_RI.abs(), "amax")
