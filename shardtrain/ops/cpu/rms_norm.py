"""RMSNorm on a CPU in chunks of rows that fit into the cache of a core, with its own backward pass.

PyTorch computes RMSNorm with six operations, and its gradient with about fifteen, each of which reads and
writes entire tensors. This module applies the same operations to chunks of 256 KB, so only the input is
read from memory and only the output is written. It saves the input and one number per row for the
backward pass. Compiled code uses PyTorch's operations, which the compiler fuses.

Shape suffixes: R rows, r rows per chunk, D features.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_CHUNK_NUMEL = 1 << 16
"""Elements per chunk. With rows of 256 elements, a quarter less took a tenth longer, and four times as many were not
faster."""

SMALLEST_NUMEL = 1 << 13
"""Minimum number of elements. For smaller tensors, as in generation, PyTorch's few calls are faster."""


class RowwiseRMSNorm(nn.RMSNorm):
    """RMSNorm (Zhang and Sennrich 2019) over the last dimension, with a weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize (..., D)."""
        # Use PyTorch for DTensors, other devices, other dtypes and small tensors.
        is_plain = all(
            type(t) in (Tensor, nn.Parameter) and t.device.type == "cpu" for t in (x, self.weight)
        )
        has_known_dtype = x.dtype == self.weight.dtype and x.dtype in (
            torch.float32,
            torch.bfloat16,
            torch.float16,
        )
        is_large = x.numel() >= SMALLEST_NUMEL
        is_last_dimension = len(self.normalized_shape) == 1
        if torch.compiler.is_compiling() or not (
            is_plain and has_known_dtype and is_large and is_last_dimension
        ):
            return super().forward(x)
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        return _RMSNorm.apply(x, self.weight, eps)  # type: ignore[no-any-return]


def use(model: nn.Module) -> None:
    """Convert each ``nn.RMSNorm`` with a weight, in place. Parameters and their names are unchanged."""
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
            # y = w n with n = x / rms(x), so dx = (w g - n mean(w g n)) / rms(x).
            mean_r1 = product_rD.mul_(weight_D).mean(-1, keepdim=True)
            dx_RD[rows] = (gradient_rD * weight_D).sub_(normed_rD.mul_(mean_r1)).mul_(inverse_r1)
        return dx_RD.view(gradients[0].shape), dweight_D.to(weight_D.dtype), None


def chunks(x_RD: Tensor) -> Iterator[slice]:
    """Yield ranges of rows of about 256 KB in float32."""
    rows_per_chunk = max(1, _CHUNK_NUMEL // x_RD.size(1))
    for start in range(0, x_RD.size(0), rows_per_chunk):
        yield slice(start, start + rows_per_chunk)
