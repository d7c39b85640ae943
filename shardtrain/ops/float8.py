"""Linear layers whose products are of 8-bit floating-point numbers (Micikevicius et al. 2022), scaled at each use.

An operand is scaled so that its largest number still fits, rounded to float8, and multiplied; the product is divided by
both scales. A scale is one number for a tensor ("tensorwise"), or one for each row of the left operand and each column
of the right one ("rowwise"). All scales are powers of two, rounded down: a power of two moves the exponents alone, so
that what a number is rounded to depends on the others beside it only where it is some 2^-14 of the largest. Ranks that
see other tokens, or other columns of a weight, then round alike, without telling each other their largest numbers.

Weights stay what they are, and are rounded again at each use. With ``emulate`` operands are rounded and the product is
an ordinary one in their own type, which holds all numbers of float8: the same numbers on any device, and slower.
Shape suffixes: R rows, P rows with room between experts, I inputs, O outputs, E experts; M, K, N of (M, K) (K, N).
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
"""Largest exponent of a scale: the product of the inverses of two of them is still a normal float32."""

Operand = tuple[str, bool]
"""A format, and whether its scales are one per row (or column) rather than one for the tensor."""
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
"""Operands of the three products of a linear layer, as torchao's recipes of these names have them: x W^T, g W, and
g^T x, which None leaves in the type of its operands. e5m2 has the range that gradients under one scale need."""

Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rows (R, I) sorted by expert, how many each has (E,), weights (E, O, I): (R, O)."""


def dtype_of(name: str) -> torch.dtype:
    """The type of PyTorch's that a device multiplies: AMD's MI300 has formats of its own, without a negative zero."""
    own = torch.version.hip and torch.cuda.is_available() and "gfx94" in torch.cuda.get_device_properties(0).gcnArchName
    if name == E4M3:
        return torch.float8_e4m3fnuz if own else torch.float8_e4m3fn
    return torch.float8_e5m2fnuz if own else torch.float8_e5m2


def powers(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Largest exponents k, int32, with amax 2^k <= the largest number of ``dtype``, at most 63."""
    # The largest number is fraction 2^exponent: 448 = 0.875 * 2^9. Exponents of amax are read from its bits, since
    # log2 would round at powers of two; where amax has a larger fraction than the largest number, k is one less
    fraction, exponent = math.frexp(torch.finfo(dtype).max)
    bits = amax.float().view(torch.int32)
    exceeds = (bits & 0x7FFFFF) > int((2 * fraction - 1) * 2**23)
    return (exponent - 1 - ((bits >> 23) - 127) - exceeds.int()).clamp(max=_MAX_POWER)


def two_to_the(power: Tensor) -> Tensor:
    """2^k in float32, exactly, of int32 exponents."""
    return ((power + 127) << 23).view(torch.float32)


def to_float8(x: Tensor, dim: int | None, name: str, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A tensor in float8, and the float32 powers of two that it is to be multiplied by.

    ``dim`` is along which numbers share a scale, None is all of them; ``amax`` gives their largest magnitudes where
    these are known. Where one is not finite, all that share its scale become NaN.
    """
    dtype = dtype_of(name)
    if amax is None:
        amax = _largest(x, dim)
    power = powers(amax, dtype)
    scale = torch.where(torch.isfinite(amax), two_to_the(power), math.nan)
    return (x * scale.to(x.dtype)).to(dtype), two_to_the(-power)


def _largest(x: Tensor, dim: int | None) -> Tensor:
    if x.numel() == 0:
        return x.new_zeros(()) if dim is None else x.sum(dim, keepdim=True)
    return x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)


def rounded(x: Tensor, dim: int | None, name: str, amax: Tensor | None = None) -> Tensor:
    """What ``to_float8`` stands for, in the type of ``x``: exact, because powers of two and short numbers are."""
    bits, inverse = to_float8(x, dim, name, amax)
    return bits.to(x.dtype) * inverse.to(x.dtype)


def product(a_MK: Tensor, b_KN: Tensor, kinds: tuple[Operand, Operand], emulate: bool, fast: bool = False) -> Tensor:
    """The product (M, N) of two matrices in float8. ``fast`` lets a device add with fewer bits, as is usual forward."""
    (a_name, a_rows), (b_name, b_rows) = kinds
    a_dim = 1 if a_rows else None
    b_dim = 0 if b_rows else None
    if emulate:
        return rounded(a_MK, a_dim, a_name) @ rounded(b_KN, b_dim, b_name)
    a8_MK, a_inverse = to_float8(a_MK, a_dim, a_name)
    b8_KN, b_inverse = to_float8(b_KN, b_dim, b_name)

    # A device takes (M, K) in rows and (K, N) in columns, and sums of whole 16: zeros are added to both until K is one
    a8_MK = a8_MK.contiguous()
    b8_NK = b8_KN.t().contiguous()
    missing = -a8_MK.size(1) % FLOAT8_MULTIPLE
    if missing:
        # As bytes, for which padding is defined; the byte 0 is the number 0
        a8_MK, b8_NK = (F.pad(x8.view(torch.uint8), (0, missing)).view(x8.dtype) for x8 in (a8_MK, b8_NK))
    b8_KN = b8_NK.t()

    options: dict[str, Any] = {"out_dtype": a_MK.dtype, "use_fast_accum": fast}
    if not (a_rows or b_rows):
        return torch._scaled_mm(a8_MK, b8_KN, a_inverse, b_inverse, **options)
    if fast and a_rows and b_rows and a_MK.dtype == torch.bfloat16:  # the kernel of row scales gives this type alone
        return torch._scaled_mm(a8_MK, b8_KN, a_inverse, b_inverse, **options)
    # Without fast sums that kernel is slow. Powers of two may as well be multiplied afterwards, and change no bit
    one = torch.ones((), dtype=torch.float32, device=a_MK.device)
    out_MN = torch._scaled_mm(a8_MK, b8_KN, one, one, **options)
    return out_MN * a_inverse.to(out_MN.dtype) * b_inverse.to(out_MN.dtype)


class _Linear(torch.autograd.Function):
    """x W^T and its gradients; operands are kept in their own type, and rounded for each product by its own scales."""

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
    """``x @ weight.T`` (..., O) of (..., I), in float8 as a recipe of RECIPES says, with gradients."""
    out_RO = _Linear.apply(x.reshape(-1, x.size(-1)), weight_OI, recipe, emulate)
    # Not a view, of which FSDP would warn, and which a network may change in place
    return torch.ops.aten._unsafe_view(out_RO, (*x.shape[:-1], weight_OI.size(0)))  # type: ignore[no-any-return]


class QuantizedLinear(nn.Linear):
    """A linear layer whose product is one of fewer bits, which ``multiply`` is."""

    @abstractmethod
    def multiply(self, x: Tensor, weight_OI: Tensor) -> Tensor:
        """Map (..., I) to (..., O) without the bias; neither is a DTensor."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., I) to (..., O); where tensor parallelism has split the weight, each rank multiplies its part."""
        if isinstance(self.weight, DTensor):
            return self._split(x)
        out = self.multiply(x, self.weight)
        return out if self.bias is None else out + self.bias

    def _split(self, x: Tensor) -> Tensor:
        weight = self.weight
        mesh = weight.device_mesh  # type: ignore[attr-defined]
        assert isinstance(weight, DTensor) and isinstance(x, DTensor)
        # A weight that is split by outputs gives a part of them, and the gradient of the input is a sum over ranks. One
        # that is split by inputs gives a share of each output, and the output is a sum over ranks
        (placement,) = weight.placements
        by_outputs = placement.is_shard(0)
        share: tuple[Placement, ...] = (Partial(),)
        x_local = x.to_local(grad_placements=share if by_outputs else None)
        out = self.multiply(x_local, weight.to_local())
        if self.bias is not None and by_outputs:
            out = out + self.bias.to_local()  # type: ignore[attr-defined]
        elif self.bias is not None:  # added once, by one rank: the outputs of all ranks are summed
            out = out + self.bias.to_local(grad_placements=share) * float(mesh.get_local_rank() == 0)  # type: ignore[attr-defined]
        return DTensor.from_local(out, mesh, (Shard(out.ndim - 1),) if by_outputs else share, run_check=False)


class Float8Linear(QuantizedLinear):
    """A linear layer in float8; parameters and their names are those of ``nn.Linear``. Made by ``convert``."""

    recipe: str
    emulate: bool

    def multiply(self, x: Tensor, weight_OI: Tensor) -> Tensor:
        """The product as the recipe has it."""
        return linear(x, weight_OI, self.recipe, self.emulate)

    def extra_repr(self) -> str:
        """As nn.Linear's, with the recipe."""
        return f"{super().extra_repr()}, float8 {self.recipe}{', emulated' if self.emulate else ''}"


def convert(module: nn.Linear, recipe: str, emulate: bool) -> None:
    """Let a plain linear layer compute in float8, in place."""
    module.__class__ = Float8Linear
    module.recipe = recipe  # type: ignore[assignment]
    module.emulate = emulate  # type: ignore[assignment]


class _Grouped(torch.autograd.Function):
    """Rows times the weights of their experts, and its gradients; all e4m3, scales by row, as "rowwise" has them."""

    @staticmethod
    def forward(
        ctx: Any, x_RI: Tensor, count_E: Tensor, weight_EOI: Tensor, multiply: Multiply, emulate: bool
    ) -> Tensor:
        ctx.save_for_backward(x_RI, count_E, weight_EOI)
        ctx.multiply = multiply
        ctx.emulate = emulate
        if emulate:
            return multiply(rounded(x_RI, -1, E4M3), count_E, rounded(weight_EOI, -1, E4M3))
        return _grouped_mm(x_RI, count_E, weight_EOI)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        (gradient_RO,) = gradients
        x_RI, count_E, weight_EOI = ctx.saved_tensors
        dx_RI = dweight_EOI = None
        if ctx.needs_input_grad[0]:
            weight_EIO = weight_EOI.transpose(1, 2)
            if ctx.emulate:
                dx_RI = ctx.multiply(rounded(gradient_RO, -1, E4M3), count_E, rounded(weight_EIO, -1, E4M3))
            else:
                dx_RI = _grouped_mm(gradient_RO, count_E, weight_EIO)
        if ctx.needs_input_grad[2]:
            dweight_EOI = _grouped_outer(gradient_RO, x_RI, count_E, ctx.emulate)
        return dx_RI, None, dweight_EOI, None, None


def grouped_product(x_RI: Tensor, count_E: Tensor, weight_EOI: Tensor, multiply: Multiply, emulate: bool) -> Tensor:
    """Each row (R, I), sorted by expert, times the weight of its expert in float8: (R, O), with gradients.

    ``multiply`` is the same in the type of its operands, which emulation calls.
    """
    return _Grouped.apply(x_RI, count_E, weight_EOI, multiply, emulate)  # type: ignore[no-any-return]


def _grouped_mm(x_RI: Tensor, count_E: Tensor, weight_EOI: Tensor) -> Tensor:
    """The product on a device that has it; (E, I, O) is given in columns, as it takes it."""
    x8_RI, x_inverse = to_float8(x_RI, -1, E4M3)
    w8_EOI, w_inverse = to_float8(weight_EOI, -1, E4M3)
    stop_E = count_E.cumsum(0).to(torch.int32)
    w8_EIO = w8_EOI.contiguous().transpose(1, 2)
    return torch._scaled_grouped_mm(
        x8_RI.contiguous(), w8_EIO, x_inverse[:, 0], w_inverse[:, :, 0].contiguous(), stop_E,
        out_dtype=torch.bfloat16, use_fast_accum=True,
    ).to(x_RI.dtype)  # fmt: skip


def _grouped_outer(gradient_RO: Tensor, x_RI: Tensor, count_E: Tensor, emulate: bool) -> Tensor:
    """g^T x of each expert's rows: (E, O, I). A scale is of a column of an expert's rows."""
    expert_R = torch.repeat_interleave(count_E, output_size=x_RI.size(0))
    g_amax_EO, x_amax_EI = (_largest_of_each(x, expert_R, count_E.numel()) for x in (gradient_RO, x_RI))
    if emulate:
        g_RO = rounded(gradient_RO, 0, E4M3, g_amax_EO[expert_R])
        x_RI = rounded(x_RI, 0, E4M3, x_amax_EI[expert_R])
        parts = zip(g_RO.split(count_E.tolist()), x_RI.split(count_E.tolist()), strict=True)
        return torch.stack([g.t() @ x for g, x in parts])
    # Sums of a device are of 16 rows at a time: each expert's rows begin at a multiple of that, zeros fill the rest
    room_E = (count_E + FLOAT8_MULTIPLE - 1) // FLOAT8_MULTIPLE * FLOAT8_MULTIPLE
    stop_E = room_E.cumsum(0)
    rows = -(-x_RI.size(0) // FLOAT8_MULTIPLE) * FLOAT8_MULTIPLE + FLOAT8_MULTIPLE * count_E.numel()
    place_R = torch.arange(x_RI.size(0), device=x_RI.device) + (stop_E - room_E - count_E.cumsum(0) + count_E)[expert_R]

    # Both operands with room, transposed: the rows are what is summed over
    operands = []
    inverses = []
    for x, amax in ((gradient_RO, g_amax_EO), (x_RI, x_amax_EI)):
        x8, _ = to_float8(x, 0, E4M3, amax[expert_R])
        wide = x.new_zeros(rows, x.size(1), dtype=torch.uint8).index_copy_(0, place_R, x8.view(torch.uint8))
        operands.append(wide.view(x8.dtype).t().contiguous())
        inverses.append(two_to_the(-powers(amax, x8.dtype)).flatten())
    options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    g8_OP, x8_IP = operands
    g_inverse, x_inverse = inverses
    stop_E = stop_E.to(torch.int32)
    out_EOI = torch._scaled_grouped_mm(g8_OP, x8_IP.t(), g_inverse, x_inverse, stop_E, **options)
    # An expert without rows has no sum, and what a device writes for it is not zero
    return torch.where((count_E > 0)[:, None, None], out_EOI, 0.0).to(gradient_RO.dtype)


def _largest_of_each(x_RI: Tensor, expert_R: Tensor, experts: int) -> Tensor:
    largest_EI = x_RI.new_zeros(experts, x_RI.size(1))
    return largest_EI.scatter_reduce_(0, expert_R[:, None].expand_as(x_RI), x_RI.abs(), "amax")
