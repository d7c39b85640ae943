"""RMSNorm on a CPU: some rows at a time, which stay in a core's cache, with a backward of its own.

PyTorch computes it there by six operations, and its gradient by some fifteen, each of which reads and writes whole
tensors. Here the same operations are applied to rows of 256 KB, so that only the input is read from memory and only the
output is written, and one number per row is kept for backward beside the input. A compiler fuses such operations by
itself and is given PyTorch's.

Shape suffixes: R rows, r rows at a time, D features of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_CHUNK_NUMEL = 1 << 16
"""Numbers at a time: a quarter less took a tenth longer, four times as many were not faster (rows of 256)."""

SMALLEST_NUMEL = 1 << 13
"""Numbers below which PyTorch's few calls are done sooner, as when tokens are generated one by one."""


class RowwiseRMSNorm(nn.RMSNorm):
    """RMSNorm (Zhang and Sennrich 2019) over the last dimension, with a weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., D)."""
        # A DTensor, a tensor of another device or another type, and small ones are left to PyTorch
        are_plain = all(type(t) in (Tensor, nn.Parameter) and t.device.type == "cpu" for t in (x, self.weight))
        has_type = x.dtype == self.weight.dtype and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        is_large = x.numel() >= SMALLEST_NUMEL and len(self.normalized_shape) == 1
        if torch.compiler.is_compiling() or not are_plain or not has_type or not is_large:
            return super().forward(x)
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        return _RMSNorm.apply(x, self.weight, eps)  # type: ignore[no-any-return]


def use(model: nn.Module) -> None:
    """Let each plain RMSNorm with a weight be computed by rows, in place; names and parameters stay."""
    for module in model.modules():
        if type(module) is nn.RMSNorm and module.weight is not None:
            module.__class__ = RowwiseRMSNorm


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        x_RD = x.contiguous().view(-1, x.size(-1))
        out_RD = torch.empty_like(x_RD)
        inverse_R1 = torch.empty(x_RD.size(0), 1, dtype=torch.float32)
        for rows in chunks(x_RD):
            x_rD = x_RD[rows].float()
            inverse_r1 = x_rD.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
            inverse_R1[rows] = inverse_r1
            out_RD[rows] = (x_rD * inverse_r1).mul_(weight_D)
        ctx.save_for_backward(x_RD, weight_D, inverse_R1)
        return out_RD.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x_RD, weight_D, inverse_R1 = ctx.saved_tensors
        gradient_RD = gradients[0].contiguous().view(x_RD.shape)
        dx_RD = torch.empty_like(x_RD)
        dweight_D = torch.zeros(x_RD.size(1), dtype=torch.float32)
        for rows in chunks(x_RD):
            gradient_rD = gradient_RD[rows].float()
            inverse_r1 = inverse_R1[rows]
            normed_rD = x_RD[rows] * inverse_r1
            product_rD = gradient_rD * normed_rD
            dweight_D += product_rD.sum(0)
            # y = w n with n = x / rms(x), so dx = (w g - n mean(w g n)) / rms(x)
            mean_r1 = product_rD.mul_(weight_D).mean(-1, keepdim=True)
            dx_RD[rows] = (gradient_rD * weight_D).sub_(normed_rD.mul_(mean_r1)).mul_(inverse_r1)
        return dx_RD.view(gradients[0].shape), dweight_D.to(weight_D.dtype), None


def chunks(x_RD: Tensor) -> Iterator[slice]:
    """Rows of 256 KB in float32 at a time."""
    at_once = max(1, _CHUNK_NUMEL // x_RD.size(1))
    return (slice(start, start + at_once) for start in range(0, x_RD.size(0), at_once))
