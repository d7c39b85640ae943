"""Fused last linear layer and cross-entropy in chunks of tokens. Memory only holds the logits of one chunk.

As in Liger Kernel (Hsu et al. 2024, arXiv 2410.10989), gradients are computed together with the loss, and
the logits of a chunk are freed before the next chunk. The gradient of the weight is stored instead, in
float32, because it is a sum over chunks.

Shape suffixes: N tokens, n tokens per chunk, D features, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardtrain.ops import cross_entropy, device_kernels
from shardtrain.ops.accelerator import sum_dtype
from shardtrain.ops.cross_entropy import ChunkFunction, chunk_loss

CHUNKS = 8
"""Maximum number of chunks. Each chunk reads and writes the gradient of the weight once."""
WORTH_IT_BYTES = 1 << 28
"""Minimum of ``saved_bytes`` for which the fused computation is used."""


def saved_bytes(tokens: int, dim: int, vocabulary: int, element_bytes: int) -> int:
    """Return the memory that the fused computation saves at its peak, in bytes.

    Negative if it needs more memory.
    """
    # Separate layers need all logits and their gradients in the model's dtype, and float32 copies of both
    # for one chunk.
    separate_rows = min(tokens, max(1, cross_entropy.CHUNK_NUMEL // vocabulary))
    separate = 2 * tokens * vocabulary * element_bytes + 8 * separate_rows * vocabulary

    # The fused function needs the same for only one chunk, and the float32 gradient of the weight.
    rows = rows_of_chunk(tokens, vocabulary)
    fused = 2 * rows * vocabulary * element_bytes + 8 * rows * vocabulary + 4 * vocabulary * dim
    return separate - fused


def linear_cross_entropy_sum(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    weight: Tensor,
    chunk: ChunkFunction | None = None,
) -> Tensor:
    """Return ``cross_entropy_sum(hidden @ weight_VD.T, targets, weight)``, a float32 scalar.

    Logits and their gradients have the dtype of ``hidden_BTD``, as in separate layers. The gradient of
    ``weight_VD`` is summed over chunks in float32 and rounded once.
    """
    hidden_ND = hidden_BTD.flatten(0, -2)
    targets_N = targets_BT.flatten()
    return _LinearCrossEntropySum.apply(
        hidden_ND, weight_VD, targets_N, weight, chunk or chunk_loss
    )  # type: ignore[no-any-return]


def rows_of_chunk(tokens: int, vocabulary: int) -> int:
    """Number of tokens per chunk."""
    return min(tokens, max(-(-tokens // CHUNKS), cross_entropy.CHUNK_NUMEL // vocabulary, 1))


class _LinearCrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        weight: Tensor,
        chunk: ChunkFunction,
    ) -> Tensor:
        loss = torch.zeros((), dtype=sum_dtype(hidden_ND.device), device=hidden_ND.device)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        dhidden_ND = torch.empty_like(hidden_ND) if needs_hidden else None

        # The gradient of the weight is a sum over chunks. In a 16-bit dtype, each addition would round it.
        exact = torch.promote_types(weight_VD.dtype, torch.float32)
        dweight_VD = torch.zeros_like(weight_VD, dtype=exact) if needs_weight else None
        is_short = hidden_ND.dtype in (torch.bfloat16, torch.float16)
        adds_in_one_kernel = is_short and device_kernels.has_matmul_into_float32(weight_VD.device)

        rows = rows_of_chunk(len(hidden_ND), len(weight_VD))
        for start in range(0, len(hidden_ND), rows):
            hidden_nD = hidden_ND[start : start + rows]
            chunk_sum, gradient_nV = chunk(
                hidden_nD @ weight_VD.t(), targets_N[start : start + rows], weight
            )
            loss += chunk_sum
            gradient_nV = gradient_nV.to(hidden_nD.dtype)
            if dhidden_ND is not None:
                dhidden_ND[start : start + rows] = gradient_nV @ weight_VD
            if dweight_VD is not None and adds_in_one_kernel:
                # This kernel multiplies and adds, so it reads and writes the sum only once.
                torch.ops.aten.addmm.dtype_out(
                    dweight_VD, gradient_nV.t(), hidden_nD, dweight_VD.dtype, out=dweight_VD
                )
            elif dweight_VD is not None:
                dweight_VD += gradient_nV.t() @ hidden_nD
            # Free the gradient before the next chunk. Otherwise two chunks would be in memory.
            del gradient_nV
        dweight = None if dweight_VD is None else dweight_VD.to(weight_VD.dtype)
        ctx.save_for_backward(dhidden_ND, dweight)
        return (loss * weight).float()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        # Multiply in place. The trainer calls backward only once, with an output gradient of exactly one.
        dhidden_ND, dweight_VD = ctx.saved_tensors
        for gradient in (dhidden_ND, dweight_VD):
            if gradient is not None:
                gradient.mul_(gradients[0].to(gradient.dtype))
        return dhidden_ND, dweight_VD, None, None, None
