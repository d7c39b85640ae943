"""Log-probability and entropy of each token, for losses that callers define on these values.

The logits are not copied: forward and backward process them in float32, one chunk of tokens at a time. Columns of the
vocabulary may be split over ranks, as in ``split_cross_entropy.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardtrain.ops.cross_entropy import CHUNK_NUMEL, CPU_CHUNK_NUMEL
from shardtrain.ops.distillation_loss import WholeVocabulary
from shardtrain.ops.split_cross_entropy import Vocabulary


def token_probabilities(
    logits_BTV: Tensor,
    targets_BT: Tensor,
    temperatures_BT: Tensor,
    vocabulary: Vocabulary | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log p(target) and the entropy of p = softmax(logits / temperature), each (B, T) in float32.

    Both are differentiable with respect to the logits.

    Args:
        targets_BT: token ids. Each must be a column of the vocabulary.
        vocabulary: split of the logits' columns over ranks. The call is then a collective.
    """
    if vocabulary is None:
        vocabulary = WholeVocabulary(logits_BTV.size(-1))
    numel = CPU_CHUNK_NUMEL if logits_BTV.device.type == "cpu" else CHUNK_NUMEL
    rows = max(1, numel // max(1, vocabulary.columns))
    log_probabilities_N, entropies_N = _TokenProbabilities.apply(  # type: ignore[no-untyped-call]
        logits_BTV.flatten(0, -2),
        targets_BT.flatten(),
        temperatures_BT.flatten().float(),
        vocabulary,
        rows,
    )
    return log_probabilities_N.view_as(targets_BT), entropies_N.view_as(targets_BT)


class _TokenProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_Nv: Tensor,
        targets_N: Tensor,
        temperatures_N: Tensor,
        vocabulary: Vocabulary,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        num_tokens, columns = logits_Nv.shape
        # Find the targets in this rank's columns. Other targets get an arbitrary column, which here_N excludes.
        local_N = targets_N - vocabulary.offset
        here_N = (local_N >= 0) & (local_N < columns)
        index_N1 = local_N.clamp(0, max(0, columns - 1)).unsqueeze(1)

        # For each token, compute the largest logit of this rank's columns, the sum of exponentials relative to
        # it, the sum of exponentials times relative logits, and the target's logit. A rank without columns uses
        # the lowest finite number, because exp(-inf - -inf) would be NaN.
        lowest = torch.finfo(torch.float32).min
        own_4N = torch.zeros(4, num_tokens, dtype=torch.float32, device=logits_Nv.device)
        own_4N[0] = lowest
        for start in range(0, num_tokens if columns else 0, rows):
            part = slice(start, start + rows)
            scaled_nv = logits_Nv[part].float() / temperatures_N[part].unsqueeze(1)
            largest_n1 = scaled_nv.amax(dim=-1, keepdim=True).clamp_min_(lowest)
            target_n = scaled_nv.gather(1, index_N1[part]).squeeze(1)
            relative_nv = scaled_nv.sub_(largest_n1)
            exponentials_nv = relative_nv.exp()
            own_4N[0, part] = largest_n1.squeeze(1)
            own_4N[1, part] = exponentials_nv.sum(dim=-1)
            own_4N[2, part] = _weighted(exponentials_nv, relative_nv).sum(dim=-1)
            own_4N[3, part] = torch.where(here_N[part], target_n, 0.0)

        # Combine the numbers of all ranks. This is the only collective.
        largest_RN, sums_RN, weighted_RN, target_RN = vocabulary.gather(own_4N).unbind(1)
        largest_N = largest_RN.amax(0)
        shift_RN = largest_RN - largest_N
        scale_RN = shift_RN.exp()
        total_N = (sums_RN * scale_RN).sum(0)
        weighted_N = ((weighted_RN + sums_RN * shift_RN) * scale_RN).sum(0)
        log_total_N = total_N.log()
        log_probabilities_N = target_RN.sum(0) - largest_N - log_total_N
        entropies_N = log_total_N - weighted_N / total_N

        ctx.rows = rows
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            logits_Nv,
            index_N1,
            here_N,
            temperatures_N,
            largest_N + log_total_N,
            entropies_N,
        )
        return log_probabilities_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        gradients_N, entropy_gradients_N = gradients
        logits_Nv, index_N1, here_N, temperatures_N, lse_N, entropies_N = ctx.saved_tensors
        gradient_Nv = torch.empty_like(logits_Nv)
        num_tokens, columns = logits_Nv.shape
        # The last ranks of a split vocabulary may have no column.
        if columns == 0:
            return gradient_Nv, None, None, None, None
        for start in range(0, num_tokens, ctx.rows):
            part = slice(start, start + ctx.rows)
            temperature_n1 = temperatures_N[part].unsqueeze(1)
            log_p_nv = logits_Nv[part].float() / temperature_n1 - lse_N[part].unsqueeze(1)
            p_nv = log_p_nv.exp()
            d_logits_nv = torch.zeros_like(p_nv)
            # The gradient of log p(target) is one_hot(target) - p.
            if gradients_N is not None:
                gradient_n1 = gradients_N[part].unsqueeze(1)
                d_logits_nv.sub_(p_nv * gradient_n1)
                d_logits_nv.scatter_add_(1, index_N1[part], gradient_n1 * here_N[part].unsqueeze(1))
            # The gradient of the entropy H is -p (log p + H).
            if entropy_gradients_N is not None:
                slope_nv = _weighted(p_nv, log_p_nv).add_(p_nv * entropies_N[part].unsqueeze(1))
                d_logits_nv.sub_(slope_nv.mul_(entropy_gradients_N[part].unsqueeze(1)))
            gradient_Nv[part] = d_logits_nv.div_(temperature_n1)
        return gradient_Nv, None, None, None, None


def _weighted(p_nv: Tensor, values_nv: Tensor) -> Tensor:
    """Return ``p * values``, and 0 where p is 0: the values are infinite there if a logit is -inf."""
    return torch.where(p_nv > 0, p_nv * values_nv, 0.0)
