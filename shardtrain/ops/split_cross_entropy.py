"""Cross-entropy of logits with columns split over ranks (loss parallelism)."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from shardtrain.ops.accelerator import sum_dtype
from shardtrain.ops.grouped_loss import GroupedLoss
from shardtrain.ops.loss_terms import LossTerms
from shardtrain.ops.targets import IGNORE

MOST_KEPT_NUMEL = 1 << 24
"""Maximum number of float32 exponentials to keep in addition to 16-bit logits: 64 MiB."""


class Vocabulary(Protocol):
    """Split of the vocabulary over ranks, with collectives of the ranks that share a token.

    Attributes:
        size: Number of columns of all ranks.
        offset: First column of this rank.
        columns: Largest number of columns of a rank. Equal on all ranks, so all process the same chunks
            of tokens.
    """

    size: int
    offset: int
    columns: int

    def max(self, values: Tensor) -> Tensor: ...
    def sum(self, values: Tensor) -> Tensor: ...
    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all ranks along a new first dimension."""
        ...


class SplitCrossEntropySum(torch.autograd.Function):
    """``cross_entropy_sum`` of logits with columns split over ranks. Every rank returns the same loss.

    The softmax is computed as in flash attention (Dao et al. 2022). For each token, a rank computes the
    largest logit of its columns, the sum of exponentials relative to it, the target's logit, and for
    label smoothing the sum of its logits. One collective exchanges these numbers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_Nv: Tensor,
        targets_N: Tensor,
        weight: Tensor,
        vocabulary: Vocabulary,
        chunks: list[slice],
        terms: LossTerms,
        grouped: GroupedLoss | None,
    ) -> Tensor:
        num_tokens, columns = logits_Nv.shape

        # Find the targets in this rank's columns. Other targets get an arbitrary column, which here_N
        # excludes.
        kept_N = targets_N != IGNORE
        local_N = targets_N - vocabulary.offset
        here_N = kept_N & (local_N >= 0) & (local_N < columns)
        index_N1 = local_N.clamp(0, max(0, columns - 1)).unsqueeze(1)

        # Keep the exponentials for backward if that is cheap: a float32 gradient can share its buffer with
        # them, and a CPU has enough memory.
        needs_gradient = ctx.needs_input_grad[0]
        gradient_Nv = torch.empty_like(logits_Nv) if needs_gradient else None
        exponentials_Nv = None
        if gradient_Nv is not None and logits_Nv.dtype == torch.float32:
            exponentials_Nv = gradient_Nv
        elif (
            needs_gradient
            and logits_Nv.device.type == "cpu"
            and logits_Nv.numel() <= MOST_KEPT_NUMEL
        ):
            exponentials_Nv = torch.empty_like(logits_Nv, dtype=torch.float32)

        # Compute each token's largest logit, sum of exponentials relative to it, and target logit. If all
        # columns are minus infinity, or the rank has no columns, use the lowest finite number: exp(-inf -
        # -inf) would be NaN.
        num_values = 4 if terms.label_smoothing else 3
        own_4N = torch.zeros(num_values, num_tokens, dtype=torch.float32, device=logits_Nv.device)
        lowest = torch.finfo(torch.float32).min
        own_4N[0] = lowest
        for part in chunks if columns else ():
            logits_nv = logits_Nv[part].float()
            largest_n1 = logits_nv.amax(dim=-1, keepdim=True).clamp_min_(lowest)
            own_4N[0, part] = largest_n1.squeeze(1)
            above = None if exponentials_Nv is None else exponentials_Nv[part]
            own_4N[1, part] = torch.sub(logits_nv, largest_n1, out=above).exp_().sum(dim=-1)
            own_4N[2, part] = torch.where(
                here_N[part], logits_nv.gather(1, index_N1[part]).squeeze(1), 0.0
            )
            if terms.label_smoothing:
                own_4N[3, part] = logits_nv.sum(dim=-1)

        # The only collective. All ranks of the split call it, including ranks without columns.
        largest_RN, sums_RN, target_RN, *logit_sums_RN = vocabulary.gather(own_4N).unbind(1)
        largest_N = largest_RN.amax(0)
        total_N = (sums_RN * (largest_RN - largest_N).exp_()).sum(0)
        # Only one rank has the logit of the target. It is zero on the others.
        log_total_N = total_N.log()
        target_N = target_RN.sum(0)
        losses_N = log_total_N - (target_N - largest_N)
        lse_N = log_total_N + largest_N
        if not terms.is_cross_entropy:
            mean_N = logit_sums_RN[0].sum(0) / vocabulary.size if logit_sums_RN else target_N
            losses_N = terms.losses(lse_N, target_N, mean_N)
        kept_losses_N = losses_N * kept_N
        loss = kept_losses_N.sum(dtype=sum_dtype(kept_losses_N.device))
        if grouped is not None:
            grouped.add(kept_losses_N)

        # Compute the gradient for this rank's columns: softmax - one_hot(target), and the gradient of the
        # terms. It needs no communication.
        if gradient_Nv is not None:
            scale_N1 = (kept_N / total_N).mul_(weight).unsqueeze(1)
            if terms.z_loss_weight:
                scale_N1 *= terms.softmax_factor(lse_N).unsqueeze(1)
            smoothing = terms.label_smoothing
            target_share_N1 = -((1 - smoothing) * weight * here_N).unsqueeze(1)
            # Kept exponentials are relative to this rank's largest logit.
            if exponentials_Nv is not None:
                scale_N1 *= (own_4N[0] - largest_N).exp_().unsqueeze(1)
            for part in chunks if columns else ():
                if exponentials_Nv is not None:
                    gradient_nv = exponentials_Nv[part]
                else:
                    gradient_nv = (logits_Nv[part].float() - largest_N[part].unsqueeze(1)).exp_()
                gradient_nv.mul_(scale_N1[part])
                gradient_nv.scatter_add_(1, index_N1[part], target_share_N1[part])
                if smoothing:
                    gradient_nv.sub_(
                        (kept_N[part] * weight * (smoothing / vocabulary.size)).unsqueeze(1)
                    )
                if exponentials_Nv is not gradient_Nv:
                    gradient_Nv[part] = gradient_nv
            ctx.save_for_backward(gradient_Nv)
        return (loss * weight).float()

    @staticmethod
    def backward(
        ctx: Any, *gradient_outputs: Tensor
    ) -> tuple[Tensor, None, None, None, None, None, None]:
        (gradient_Nv,) = ctx.saved_tensors
        # Multiply in place. The trainer calls backward only once, with an output gradient of exactly one.
        return (
            gradient_Nv.mul_(gradient_outputs[0].to(gradient_Nv.dtype)),
            None,
            None,
            None,
            None,
            None,
            None,
        )
