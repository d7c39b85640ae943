"""Cross-entropy of logits whose columns are split over ranks: loss parallelism."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from shardtrain.ops.targets import IGNORE

MOST_KEPT_NUMEL = 1 << 24
"""Exponentials that are kept beside logits of 16 bits: 64 MiB."""


class Vocabulary(Protocol):
    """How the vocabulary is split: its size, this rank's first id, and collectives of the ranks that share a token.

    ``columns`` is the size of the largest part: equal on all ranks, so that all reduce chunks of the same tokens.
    """

    size: int
    offset: int
    columns: int

    def max(self, values: Tensor) -> Tensor: ...
    def sum(self, values: Tensor) -> Tensor: ...
    def gather(self, values: Tensor) -> Tensor:
        """The values of each rank, one after the other along a new first dimension."""
        ...


class SplitCrossEntropySum(torch.autograd.Function):
    """As ``cross_entropy_sum``, of logits whose columns are split over ranks; each rank of the split gets one loss.

    Softmax is found as flash attention finds it (Dao et al. 2022): each rank takes the largest logit of its columns,
    the sum of exponentials below it, and the target's logit, three numbers a token, which ranks exchange once.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_Nv: Tensor, targets_N: Tensor, weight: Tensor, vocabulary: Vocabulary, chunks: list[slice]
    ) -> Tensor:
        num_tokens, columns = logits_Nv.shape

        # Of the targets, those that this rank has a column for; the others take some column, and here_N drops it
        kept_N = targets_N != IGNORE
        local_N = targets_N - vocabulary.offset
        here_N = kept_N & (local_N >= 0) & (local_N < columns)
        index_N1 = local_N.clamp(0, max(0, columns - 1)).unsqueeze(1)

        # Of each token: the largest logit, the sum of exponentials below it, and the logit of its target. Columns that
        # are all minus infinity, and a rank without columns, add nothing: the lowest finite number stands for these,
        # since exp(-inf - -inf) would be NaN
        # Exponentials are kept for the gradient where that is cheap: in its own memory if it is float32, on a CPU else
        needs_gradient = ctx.needs_input_grad[0]
        gradient_Nv = torch.empty_like(logits_Nv) if needs_gradient else None
        exponentials_Nv = None
        if gradient_Nv is not None and logits_Nv.dtype == torch.float32:
            exponentials_Nv = gradient_Nv
        elif needs_gradient and logits_Nv.device.type == "cpu" and logits_Nv.numel() <= MOST_KEPT_NUMEL:
            exponentials_Nv = torch.empty_like(logits_Nv, dtype=torch.float32)
        own_3N = torch.zeros(3, num_tokens, dtype=torch.float32, device=logits_Nv.device)
        lowest = torch.finfo(torch.float32).min
        own_3N[0] = lowest
        for part in chunks if columns else ():
            logits_nv = logits_Nv[part].float()
            largest_n1 = logits_nv.amax(dim=-1, keepdim=True).clamp_min_(lowest)
            own_3N[0, part] = largest_n1.squeeze(1)
            above = None if exponentials_Nv is None else exponentials_Nv[part]
            own_3N[1, part] = torch.sub(logits_nv, largest_n1, out=above).exp_().sum(dim=-1)
            own_3N[2, part] = torch.where(here_N[part], logits_nv.gather(1, index_N1[part]).squeeze(1), 0.0)

        # The one collective. All ranks of the split enter it, also one that has no column
        largest_RN, sums_RN, target_RN = vocabulary.gather(own_3N).unbind(1)
        largest_N = largest_RN.amax(0)
        total_N = (sums_RN * (largest_RN - largest_N).exp_()).sum(0)
        # The target is the logit of one rank, and zero on the others
        losses_N = (total_N.log() - (target_RN.sum(0) - largest_N)) * kept_N
        loss = losses_N.sum(dtype=torch.float64)

        # softmax - one_hot(target) for this rank's columns, which needs nothing more of the others
        if gradient_Nv is not None:
            scale_N1 = (kept_N / total_N).mul_(weight).unsqueeze(1)
            if exponentials_Nv is not None:  # they are of this rank's largest logit
                scale_N1 *= (own_3N[0] - largest_N).exp_().unsqueeze(1)
            for part in chunks if columns else ():
                if exponentials_Nv is not None:
                    gradient_nv = exponentials_Nv[part]
                else:
                    gradient_nv = (logits_Nv[part].float() - largest_N[part].unsqueeze(1)).exp_()
                gradient_nv.mul_(scale_N1[part])
                gradient_nv.scatter_add_(1, index_N1[part], -(here_N[part] * weight).unsqueeze(1))
                if exponentials_Nv is not gradient_Nv:
                    gradient_Nv[part] = gradient_nv
            ctx.save_for_backward(gradient_Nv)
        return (loss * weight).float()

    @staticmethod
    def backward(ctx: Any, *gradient_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient_Nv,) = ctx.saved_tensors
        # In place: the trainer calls backward once, with an output gradient of exactly one.
        return gradient_Nv.mul_(gradient_outputs[0].to(gradient_Nv.dtype)), None, None, None, None
