"""ORPO: preference optimization combined with fine-tuning, without a reference (Hong et al. 2024, arXiv
2403.07691).

The loss of a pair (equation 6) is L - beta * log sigmoid(log odds(chosen) - log odds(rejected)). L is the
mean token loss of the prompt with the chosen answer, as in the authors' code. The odds are p / (1 - p),
where log p is the mean log-probability of an answer's tokens. The loss is summed over pairs and divided
once by the pairs of the step, so pairs have equal weight whatever their length.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.data.row_stream import RowBatch
from shardtrain.ops.accelerator import sum_dtype
from shardtrain.ops.targets import IGNORE
from shardtrain.tasks._answers import PairTask, token_losses

METRICS = {"reward_accuracy": "max", "reward_margin": "max"}
DEGREES = ("tensor_parallel_degree",)


class ORPO(PairTask):
    """The task ``orpo``."""

    def forward(self, model: nn.Module, batch: RowBatch) -> Tensor:
        """Return (B, 3): the mean log-probabilities of chosen and rejected answer, and the mean loss of the
        chosen text."""
        tokens_B2T = batch["tokens_B2T"]
        answers_B2T = batch["targets_B2T"]
        is_answer_B2T = answers_B2T != IGNORE
        columns_T = torch.arange(tokens_B2T.size(-1), device=tokens_B2T.device)

        # Build the targets of prompt and answer. The target of a token is the next input token, until padding
        # begins after the answer. The last target of an answer is not an input token, so take the targets
        # within answers from ``answers_B2T``.
        end_B21 = (is_answer_B2T * (columns_T + 1)).amax(-1, keepdim=True)
        is_text_B2T = columns_T < end_B21
        targets_B2T = torch.where(is_text_B2T, tokens_B2T.roll(-1, dims=-1), IGNORE)
        targets_B2T = torch.where(is_answer_B2T, answers_B2T, targets_B2T)

        # one forward pass computes the losses of the answers and of the full chosen text
        losses_RT = token_losses(model, tokens_B2T.flatten(0, 1), targets_B2T.flatten(0, 1))
        losses_B2T = losses_RT.unflatten(0, (-1, 2))
        wide = sum_dtype(losses_B2T.device)
        means_B2 = -(losses_B2T * is_answer_B2T).sum(-1, dtype=wide) / is_answer_B2T.sum(-1)
        text_loss_B = losses_B2T[:, 0].sum(-1, dtype=wide) / is_text_B2T[:, 0].sum(-1)
        return torch.cat((means_B2, text_loss_B[:, None]), dim=1)

    def loss_sum(self, outputs: Tensor, batch: RowBatch, weight: Tensor) -> Tensor:
        """Return the weighted sum over pairs of the loss in the module docstring."""
        log_odds_B2 = outputs[:, :2] - _log1m_exp(outputs[:, :2])
        preference_B = F.logsigmoid(log_odds_B2[:, 0] - log_odds_B2[:, 1])
        return weight * (outputs[:, 2] - self.config.task.beta * preference_B).sum()

    def predictions(self, outputs: Tensor, batch: RowBatch) -> dict[str, Tensor]:
        """Return the rewards (B, 2) of each pair: beta times the mean log-probabilities."""
        return {"rewards": (self.config.task.beta * outputs[:, :2]).float()}


def _log1m_exp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0, with the formula that is accurate on each side of -log 2 (Maechler
    2012)."""
    # a probability of 1 has infinite odds
    x = x.clamp(max=-1e-12)
    is_near_zero = x > -math.log(2)
    # Replace the inputs that a formula does not handle, so its gradient is finite there: where() multiplies
    # the gradient by zero, and zero times infinity is NaN.
    near_zero = torch.log(-torch.expm1(torch.where(is_near_zero, x, -torch.ones_like(x))))
    elsewhere = torch.log1p(-torch.exp(torch.where(is_near_zero, -torch.ones_like(x), x)))
    return torch.where(is_near_zero, near_zero, elsewhere)


Task = ORPO
