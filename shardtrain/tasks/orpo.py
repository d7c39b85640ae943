"""Preferences and the answers themselves at once, without a reference (ORPO: Hong et al. 2024, arXiv 2403.07691).

A pair's loss (equation 6) is the mean loss of the tokens of the prompt with the chosen answer, as in the authors' code,
less beta times the log sigmoid of how much larger the odds of the chosen answer are than those of the rejected one,
where an answer's probability is that of its tokens on average: odds = p / (1 - p). It is summed over pairs and divided
once by the pairs of the whole step, so that a pair counts as much as any other, whatever its length.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.data.row_stream import RowBatch
from shardtrain.ops.targets import IGNORE
from shardtrain.tasks._answers import PairTask, token_losses

METRICS = {"reward_accuracy": "max", "reward_margin": "max"}
DEGREES = ("tensor_parallel_degree",)


class ORPO(PairTask):
    """The task ``orpo``."""

    def forward(self, model: nn.Module, batch: RowBatch) -> Tensor:
        """Mean log-probabilities of the answers (chosen, rejected), and the chosen text's mean loss: (B, 3)."""
        tokens_B2T = batch["tokens_B2T"]
        answers_B2T = batch["targets_B2T"]
        is_answer_B2T = answers_B2T != IGNORE
        places_T = torch.arange(tokens_B2T.size(-1), device=tokens_B2T.device)

        # The targets of whole texts, prompts too: all tokens up to the last of an answer, since filler follows it. The
        # last target of an answer is not among the tokens, so those of answers are put in as they are.
        last_B21 = (is_answer_B2T * (places_T + 1)).amax(-1, keepdim=True)
        within_B2T = places_T < last_B21
        every_B2T = torch.where(within_B2T, tokens_B2T.roll(-1, dims=-1), IGNORE)
        every_B2T = torch.where(is_answer_B2T, answers_B2T, every_B2T)

        # One forward pass gives the losses of both: of the answers' tokens, and of the whole chosen text.
        losses_B2T = token_losses(model, tokens_B2T.flatten(0, 1), every_B2T.flatten(0, 1)).unflatten(0, (-1, 2))
        means_B2 = -(losses_B2T * is_answer_B2T).sum(-1, dtype=torch.float64) / is_answer_B2T.sum(-1)
        text_B = losses_B2T[:, 0].sum(-1, dtype=torch.float64) / within_B2T[:, 0].sum(-1)
        return torch.cat((means_B2, text_B[:, None]), dim=1)

    def loss_sum(self, outputs: Tensor, batch: RowBatch, weight: Tensor) -> Tensor:
        """The chosen texts' losses and those of the odds, over pairs."""
        odds_B2 = outputs[:, :2] - _log_of_rest(outputs[:, :2])
        ratio_B = F.logsigmoid(odds_B2[:, 0] - odds_B2[:, 1])
        return weight * (outputs[:, 2] - self.config.task.beta * ratio_B).sum()

    def predictions(self, outputs: Tensor, batch: RowBatch) -> dict[str, Tensor]:
        """The rewards of each pair: beta times the mean log-probabilities."""
        return {"rewards": (self.config.task.beta * outputs[:, :2]).float()}


def _log_of_rest(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x below 0, whose two forms are each exact on their side of -log 2 (Maechler 2012)."""
    # A probability of 1 has infinite odds.
    x = x.clamp(max=-1e-12)
    near = x > -math.log(2)
    # Each form is given values that it can take, so that the gradient of the one not used is finite too: where() takes
    # zero times it, and zero times infinity is NaN.
    small = torch.log(-torch.expm1(torch.where(near, x, -torch.ones_like(x))))
    large = torch.log1p(-torch.exp(torch.where(near, -torch.ones_like(x), x)))
    return torch.where(near, small, large)


Task = ORPO
