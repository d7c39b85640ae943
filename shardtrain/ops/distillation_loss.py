"""Distillation loss: cross-entropy mixed with a divergence of student and teacher, as sums over tokens.

The loss of a target token is ``(1 - r) * cross_entropy(s) + r * T^2 * D(softmax(t / T), softmax(s / T))``,
with logits s and t of student and teacher, temperature T and ratio r. The factor T^2 makes the magnitude of
the second gradient independent of T (Hinton et al. 2015, section 2). D is one of

- forward_kl: KL(teacher || student) (Hinton et al. 2015);
- reverse_kl: KL(student || teacher) (MiniLLM, Gu et al. 2023);
- jsd: b KL(teacher || m) + (1 - b) KL(student || m) with m = b teacher + (1 - b) student (GKD,
  Agarwal et al. 2023).

As in ``cross_entropy.py``, chunks of tokens are float32, sums are float64, the gradient is computed with
the loss, and columns of the vocabulary may be split over ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardtrain.ops.accelerator import sum_dtype
from shardtrain.ops.cross_entropy import CHUNK_NUMEL, Vocabulary
from shardtrain.ops.targets import IGNORE


@dataclass(frozen=True)
class Mix:
    """Parameters of the loss; see the module's docstring.

    Attributes:
        ratio: Weight r of the divergence.
        temperature: T.
        divergence: forward_kl, reverse_kl or jsd.
        jsd_beta: Weight b of the teacher for jsd.
    """

    ratio: float
    temperature: float
    divergence: str
    jsd_beta: float


class WholeVocabulary:
    """Vocabulary that is not split: every rank has all columns.

    Implements ``split_cross_entropy.Vocabulary``.
    """

    offset = 0

    def __init__(self, columns: int) -> None:
        self.size = self.columns = columns

    def max(self, values: Tensor) -> Tensor:
        """Return the values unchanged, because no other rank has columns."""
        return values

    def sum(self, values: Tensor) -> Tensor:
        """Return the values unchanged, because no other rank has columns."""
        return values

    def gather(self, values: Tensor) -> Tensor:
        """Return the values with a new first dimension for the single rank."""
        return values.unsqueeze(0)


def distillation_sum(
    logits_BTV: Tensor,
    teacher_BTV: Tensor,
    targets_BT: Tensor,
    mix: Mix,
    weight: Tensor | float = 1.0,
    vocabulary: Vocabulary | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``weight`` times the sum of the loss over targets except IGNORE, a float32 scalar,
    and its two parts.

    The parts, (2,) in float64, are the unweighted sums of cross-entropy and of D, without gradient. If
    student and teacher have different numbers of columns because of padding, D only includes their common
    columns.
    """
    if vocabulary is None:
        vocabulary = WholeVocabulary(logits_BTV.size(-1))
    weight = torch.as_tensor(weight, dtype=torch.float32, device=logits_BTV.device)
    # Process chunks of rows, because float32 copies of all logits would be large.
    rows = max(1, CHUNK_NUMEL // vocabulary.columns)
    logits_NV = logits_BTV.flatten(0, -2)
    teacher_NV = teacher_BTV.flatten(0, -2)
    targets_N = targets_BT.flatten()
    result: tuple[Tensor, Tensor] = _DistillationSum.apply(  # type: ignore[no-untyped-call]
        logits_NV, teacher_NV, targets_N, weight, mix, vocabulary, rows
    )
    return result


def _chunk(
    logits_nV: Tensor, teacher_nV: Tensor, targets_n: Tensor, mix: Mix, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor]:
    """Return the float64 sums (2,) of cross-entropy and D of n tokens, and the float32 gradient (n, V) of their mix."""
    logits_nV = logits_nV.float()
    teacher_nV = teacher_nV.float()
    # Compute the cross-entropy. Only one rank has the column of a target.
    kept_n = targets_n != IGNORE
    log_nV = _log_softmax(logits_nV, vocabulary)
    local_n = targets_n - vocabulary.offset
    here_n = kept_n & (local_n >= 0) & (local_n < log_nV.size(-1))
    index_n1 = local_n.clamp(0, log_nV.size(-1) - 1).unsqueeze(1)
    losses_n = -vocabulary.sum(log_nV.gather(1, index_n1).squeeze(1) * here_n)
    # The gradient of the cross-entropy is the probabilities minus one-hot targets.
    gradient_nV = log_nV.exp().scatter_add_(1, index_n1, -here_n.float().unsqueeze(1))
    gradient_nV.mul_(1 - mix.ratio)

    # Compute D over the common columns. At temperature 1, reuse the student's log-probabilities from above.
    both = min(logits_nV.size(-1), teacher_nV.size(-1))
    temperature = mix.temperature
    if temperature != 1.0 or both < logits_nV.size(-1):
        log_nV = _log_softmax(logits_nV[:, :both] / temperature, vocabulary)
    log_teacher_nV = _log_softmax(teacher_nV[:, :both] / temperature, vocabulary)
    divergences_n, slope_nV = _divergence(log_teacher_nV, log_nV, mix, vocabulary)
    # D is multiplied by T^2 and depends on logits / T, so its gradient with respect to a logit has the
    # factor T.
    gradient_nV[:, :both].add_(slope_nV, alpha=mix.ratio * temperature)
    wide = sum_dtype(losses_n.device)
    sum_of_losses = (losses_n * kept_n).sum(dtype=wide)
    sum_of_divergences = (divergences_n * kept_n).sum(dtype=wide)
    sums_2 = torch.stack([sum_of_losses, sum_of_divergences])
    return sums_2, gradient_nV.mul_(kept_n.unsqueeze(1))


def _divergence(
    log_p_nV: Tensor, log_q_nV: Tensor, mix: Mix, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor]:
    """Return D (n,) of the teacher's p and the student's q, and its gradient with respect to the logits of q."""
    p_nV = log_p_nV.exp()
    q_nV = log_q_nV.exp()
    # D = sum p (log p - log q), and its gradient is q - p.
    if mix.divergence == "forward_kl":
        return vocabulary.sum(_expected(p_nV, log_p_nV - log_q_nV).sum(-1)), q_nV - p_nV
    # D = sum q (log q - log p), and its gradient is q (log q - log p - D).
    if mix.divergence == "reverse_kl":
        terms_nV = _expected(q_nV, log_q_nV - log_p_nV)
        divergences_n = vocabulary.sum(terms_nV.sum(-1))
        return divergences_n, terms_nV - q_nV * divergences_n.unsqueeze(1)
    # D = beta KL(p, m) + (1 - beta) KL(q, m) with the mixture m = beta p + (1 - beta) q. Its gradient is
    # (1 - beta) q (log q - log m - KL(q, m)). Compute m in the log domain. One collective sums both
    # divergences over ranks.
    beta = mix.jsd_beta
    log_m_nV = torch.logaddexp(log_p_nV + math.log(beta), log_q_nV + math.log1p(-beta))
    of_teacher_n = _expected(p_nV, log_p_nV - log_m_nV).sum(-1)
    terms_nV = _expected(q_nV, log_q_nV - log_m_nV)
    both_2n = torch.stack((of_teacher_n, terms_nV.sum(-1)))
    teacher_n, student_n = vocabulary.sum(both_2n).unbind(0)
    gradient_nV = (terms_nV - q_nV * student_n.unsqueeze(1)) * (1 - beta)
    return beta * teacher_n + (1 - beta) * student_n, gradient_nV


def _expected(p_nV: Tensor, values_nV: Tensor) -> Tensor:
    """Return ``p * values``, and 0 where p is 0: the values may be infinite there, if a logit is -inf."""
    return torch.where(p_nV > 0, p_nV * values_nV, 0.0)


def _log_softmax(logits_nV: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return the log-softmax over the columns of all ranks."""
    if isinstance(vocabulary, WholeVocabulary):
        return F.log_softmax(logits_nV, dim=-1)
    shifted_nV = logits_nV - vocabulary.max(logits_nV.amax(dim=-1)).unsqueeze(1)
    return shifted_nV - vocabulary.sum(shifted_nV.exp().sum(dim=-1)).log_().unsqueeze(1)


class _DistillationSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        teacher_NV: Tensor,
        targets_N: Tensor,
        weight: Tensor,
        mix: Mix,
        vocabulary: Vocabulary,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        sums_2 = torch.zeros(2, dtype=sum_dtype(logits_NV.device), device=logits_NV.device)
        gradient_NV = torch.empty_like(logits_NV)
        for start in range(0, logits_NV.size(0), rows):
            part = slice(start, start + rows)
            chunk_2, gradient_nV = _chunk(
                logits_NV[part], teacher_NV[part], targets_N[part], mix, vocabulary
            )
            sums_2 += chunk_2
            gradient_NV[part] = gradient_nV.mul_(weight)
        ctx.save_for_backward(gradient_NV)
        ctx.mark_non_differentiable(sums_2)
        loss = (1 - mix.ratio) * sums_2[0] + mix.ratio * mix.temperature**2 * sums_2[1]
        return (loss * weight).float(), sums_2

    @staticmethod
    def backward(
        ctx: Any, *gradient_outputs: Tensor
    ) -> tuple[Tensor, None, None, None, None, None, None]:
        (gradient_NV,) = ctx.saved_tensors
        # Multiply in place. The trainer calls backward only once, with an output gradient of exactly one.
        return (
            gradient_NV.mul_(gradient_outputs[0].to(gradient_NV.dtype)),
            None,
            None,
            None,
            None,
            None,
            None,
        )
