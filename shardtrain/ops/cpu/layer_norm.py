"""LayerNorm on a CPU in 16 bits, with gradients of weight and bias summed in float32.

PyTorch 2.13 sums these gradients in the dtype of the weight, which loses small terms. In bfloat16, the
gradient of a bias has an error of 13 % over 2,560 rows, and of 80 % over 16,384 rows. PyTorch sums in
float32 on accelerators and in compiled code. Like ``rms_norm.py``, this module processes chunks of rows.

Shape suffixes: R rows, r rows per chunk, D features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardtrain.ops.cpu.rms_norm import chunks


class Float32SumLayerNorm(nn.LayerNorm):
    """LayerNorm (Ba et al. 2016) over the last dimension, with a weight and an optional bias."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize (..., D)."""
        tensors = [input, self.weight]
        if self.bias is not None:
            tensors.append(self.bias)
        # Use PyTorch for DTensors, other devices and other dtypes.
        is_plain = all(
            type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" for x in tensors
        )
        is_16_bit = all(x.dtype in (torch.bfloat16, torch.float16) for x in tensors)
        is_last_dimension = len(self.normalized_shape) == 1
        if torch.compiler.is_compiling() or not (is_plain and is_16_bit and is_last_dimension):
            return super().forward(input)
        return _LayerNorm.apply(input, self.weight, self.bias, self.eps)  # type: ignore[no-any-return]


def use(model: nn.Module) -> None:
    """Convert each ``nn.LayerNorm`` with a weight, in place. Parameters and their names are unchanged."""
    for module in model.modules():
        if type(module) is nn.LayerNorm and module.weight is not None:
            module.__class__ = Float32SumLayerNorm


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
        x_RD = x.contiguous().view(-1, x.size(-1))
        out_RD = torch.empty_like(x_RD)
        mean_R1 = torch.empty(x_RD.size(0), 1, dtype=torch.float32)
        inverse_R1 = torch.empty(x_RD.size(0), 1, dtype=torch.float32)
        for rows in chunks(x_RD):
            x_rD = x_RD[rows].float()
            mean_r1 = x_rD.mean(-1, keepdim=True)
            x_rD = x_rD - mean_r1
            inverse_r1 = x_rD.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
            mean_R1[rows] = mean_r1
            inverse_R1[rows] = inverse_r1
            scaled_rD = (x_rD * inverse_r1).mul_(weight_D)
            out_RD[rows] = scaled_rD if bias_D is None else scaled_rD.add_(bias_D)
        ctx.save_for_backward(x_RD, weight_D, mean_R1, inverse_R1)
        ctx.has_bias = bias_D is not None
        return out_RD.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x_RD, weight_D, mean_R1, inverse_R1 = ctx.saved_tensors
        gradient_RD = gradients[0].contiguous().view(x_RD.shape)
        dx_RD = torch.empty_like(x_RD)
        dweight_D = torch.zeros(x_RD.size(1), dtype=torch.float32)
        dbias_D = torch.zeros(x_RD.size(1), dtype=torch.float32)
        for rows in chunks(x_RD):
            gradient_rD = gradient_RD[rows].float()
            inverse_r1 = inverse_R1[rows]
            normed_rD = (x_RD[rows].float() - mean_R1[rows]).mul_(inverse_r1)
            dweight_D += (gradient_rD * normed_rD).sum(0)
            dbias_D += gradient_rD.sum(0)
            # y = w n + b with n = (x - mean) / deviation, so dx = (h - mean(h) - n mean(h n)) / deviation
            # with h = w g.
            scaled_rD = gradient_rD * weight_D
            along_r1 = (scaled_rD * normed_rD).mean(-1, keepdim=True)
            dx_rD = scaled_rD.sub_(scaled_rD.mean(-1, keepdim=True)).sub_(normed_rD.mul_(along_r1))
            dx_RD[rows] = dx_rD.mul_(inverse_r1)
        dbias = dbias_D.to(weight_D.dtype) if ctx.has_bias else None
        return dx_RD.view(gradients[0].shape), dweight_D.to(weight_D.dtype), dbias, None
