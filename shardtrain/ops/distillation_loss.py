"""What a student learns of a teacher: cross-entropy mixed with a divergence of two distributions, as sums over tokens.

For each target token, with s and t the logits of student and teacher, T the temperature and r the ratio:
``(1 - r) * cross_entropy(s) + r * T^2 * D(softmax(t / T), softmax(s / T))``. The factor T^2 keeps the gradient of the
second term as large as it is at T = 1 (Hinton et al. 2015, section 2). D is one of

- forward_kl: KL(teacher || student) (Hinton et al. 2015);
- reverse_kl: KL(student || teacher) (MiniLLM, Gu et al. 2023);
- jsd: b KL(teacher || m) + (1 - b) KL(student || m) with m = b teacher + (1 - b) student (GKD, Agarwal et al. 2023).

As in ``cross_entropy.py``, sums are in float64 over chunks of tokens in float32, the gradient is computed with them,
and columns of the vocabulary may be split over ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardtrain.ops.cross_entropy import CHUNK_NUMEL, Vocabulary
from shardtrain.ops.targets import IGNORE


@dataclass(frozen=True)
class Mix:
    """What is summed: see the module."""

    ratio: float
    temperature: float
    divergence: str
    jsd_beta: float


class WholeVocabulary:
    """All columns on each rank, see ``split_cross_entropy.Vocabulary``."""

    offset = 0

    def __init__(self, columns: int) -> None:
        self.size = self.columns = columns

    def max(self, values: Tensor) -> Tensor:
        """The values."""
        return values

    def sum(self, values: Tensor) -> Tensor:
        """The values."""
        return values

    def gather(self, values: Tensor) -> Tensor:
        """The values of the one rank."""
        return values.unsqueeze(0)


def distillation_sum(
    logits_BTV: Tensor,
    teacher_BTV: Tensor,
    targets_BT: Tensor,
    mix: Mix,
    weight: Tensor | float = 1.0,
    vocabulary: Vocabulary | None = None,
) -> tuple[Tensor, Tensor]:
    """``weight`` times the sum over targets that are not IGNORE, a float32 scalar, and its two parts.

    The parts (2,), float64, without gradient and without weight, are the sums of cross-entropy and of D. Where the two
    have different numbers of columns, which end in rows that no token has, D is over those that both have.
    """
    if vocabulary is None:
        vocabulary = WholeVocabulary(logits_BTV.size(-1))
    weight = torch.as_tensor(weight, dtype=torch.float32, device=logits_BTV.device)
    rows = max(1, CHUNK_NUMEL // vocabulary.columns)
    logits_NV = logits_BTV.flatten(0, -2)
    teacher_NV = teacher_BTV.flatten(0, -2)
    targets_N = targets_BT.flatten()
    found: tuple[Tensor, Tensor] = _DistillationSum.apply(  # type: ignore[no-untyped-call]
        logits_NV, teacher_NV, targets_N, weight, mix, vocabulary, rows
    )
    return found


def _chunk(
    logits_nV: Tensor, teacher_nV: Tensor, targets_n: Tensor, mix: Mix, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor]:
    """Sums (2,) of cross-entropy and D of n tokens, float64, and the gradient (n, V) of their mix, float32."""
    logits_nV = logits_nV.float()
    teacher_nV = teacher_nV.float()
    # Cross-entropy with the target, which is a column of one rank
    kept_n = targets_n != IGNORE
    log_nV = _log_softmax(logits_nV, vocabulary)
    local_n = targets_n - vocabulary.offset
    here_n = kept_n & (local_n >= 0) & (local_n < log_nV.size(-1))
    index_n1 = local_n.clamp(0, log_nV.size(-1) - 1).unsqueeze(1)
    losses_n = -vocabulary.sum(log_nV.gather(1, index_n1).squeeze(1) * here_n)
    gradient_nV = log_nV.exp().scatter_add_(1, index_n1, -here_n.float().unsqueeze(1)).mul_(1 - mix.ratio)

    # D over the columns that both have; at a temperature of 1 the student's log-probabilities are those from above
    both = min(logits_nV.size(-1), teacher_nV.size(-1))
    temperature = mix.temperature
    if temperature != 1.0 or both < logits_nV.size(-1):
        log_nV = _log_softmax(logits_nV[:, :both] / temperature, vocabulary)
    log_teacher_nV = _log_softmax(teacher_nV[:, :both] / temperature, vocabulary)
    divergences_n, slope_nV = _divergence(log_teacher_nV, log_nV, mix, vocabulary)
    # D has the factor T^2, and is of logits over T: its gradient by a logit has T
    gradient_nV[:, :both].add_(slope_nV, alpha=mix.ratio * temperature)
    sums_2 = torch.stack([(part_n * kept_n).sum(dtype=torch.float64) for part_n in (losses_n, divergences_n)])
    return sums_2, gradient_nV.mul_(kept_n.unsqueeze(1))


def _divergence(log_p_nV: Tensor, log_q_nV: Tensor, mix: Mix, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """D of the teacher's p and the student's q, (n,), and its gradient by what q is the softmax of."""
    p_nV = log_p_nV.exp()
    q_nV = log_q_nV.exp()
    if mix.divergence == "forward_kl":
        return vocabulary.sum(_expected(p_nV, log_p_nV - log_q_nV).sum(-1)), q_nV - p_nV
    if mix.divergence == "reverse_kl":
        terms_nV = _expected(q_nV, log_q_nV - log_p_nV)
        divergences_n = vocabulary.sum(terms_nV.sum(-1))
        return divergences_n, terms_nV - q_nV * divergences_n.unsqueeze(1)
    # The mixture m in the log domain; the parts of both divergences are added up over ranks in one sum
    beta = mix.jsd_beta
    log_m_nV = torch.logaddexp(log_p_nV + math.log(beta), log_q_nV + math.log1p(-beta))
    of_teacher_n = _expected(p_nV, log_p_nV - log_m_nV).sum(-1)
    terms_nV = _expected(q_nV, log_q_nV - log_m_nV)
    teacher_n, student_n = vocabulary.sum(torch.stack((of_teacher_n, terms_nV.sum(-1)))).unbind(0)
    gradient_nV = (terms_nV - q_nV * student_n.unsqueeze(1)) * (1 - beta)
    return beta * teacher_n + (1 - beta) * student_n, gradient_nV


def _expected(p_nV: Tensor, values_nV: Tensor) -> Tensor:
    """``p * values``, and 0 where p is: a model may give a token the logit -inf."""
    return torch.where(p_nV > 0, p_nV * values_nV, 0.0)


def _log_softmax(logits_nV: Tensor, vocabulary: Vocabulary) -> Tensor:
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
        sums_2 = torch.zeros(2, dtype=torch.float64, device=logits_NV.device)
        gradient_NV = torch.empty_like(logits_NV)
        for start in range(0, logits_NV.size(0), rows):
            part = slice(start, start + rows)
            chunk_2, gradient_nV = _chunk(logits_NV[part], teacher_NV[part], targets_N[part], mix, vocabulary)
            sums_2 += chunk_2
            gradient_NV[part] = gradient_nV.mul_(weight)
        ctx.save_for_backward(gradient_NV)
        ctx.mark_non_differentiable(sums_2)
        loss = (1 - mix.ratio) * sums_2[0] + mix.ratio * mix.temperature**2 * sums_2[1]
        return (loss * weight).float(), sums_2

    @staticmethod
    def backward(ctx: Any, *gradient_outputs: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        (gradient_NV,) = ctx.saved_tensors
        # In place: the trainer calls backward once, with an output gradient of exactly one.
        return gradient_NV.mul_(gradient_outputs[0].to(gradient_NV.dtype)), None, None, None, None, None, None
