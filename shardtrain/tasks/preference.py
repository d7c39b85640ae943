"""DPO and its variants: learn from pairs of a chosen and a rejected answer to a prompt (Rafailov et al. 2023).

The reward of an answer is beta times the difference of its log-probabilities under the model and under the
reference model. ``pair_losses`` computes the loss of each pair from the rewards. Losses are summed over
pairs and divided once by the pairs of the step.

The reference model is frozen: the initial model, or the one in ``task.reference_path``, on the same mesh
(``train/reference_models.py``). With ``task.reference_free`` its log-probabilities are 0. ``simpo.py`` and
``orpo.py`` need no reference; ``kto.py`` needs no pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.config.schema.task_options import Task as TaskOptions
from shardtrain.data.row_stream import RowBatch
from shardtrain.tasks._answers import Pair, PairTask, answer_lengths, of_pairs

__all__ = ["Pair", "Preference", "Task"]

METRICS = {"reward_accuracy": "max", "reward_margin": "max"}
DEGREES = ("tensor_parallel_degree",)


class Preference(PairTask):
    """The task ``preference``."""

    @property
    def needs_reference(self) -> bool:
        """True unless ``task.reference_free``."""
        return not self.config.task.reference_free

    def forward(self, model: nn.Module, batch: RowBatch) -> Tensor:
        """Return (B, 3): the rewards of the chosen and the rejected answer, and the log-probability of the
        chosen answer."""
        answers_B2 = of_pairs(model, batch)
        # Without a reference model, its log-probabilities count as 0.
        reference_B2 = torch.zeros_like(answers_B2)
        if self.needs_reference:
            assert self.reference is not None, "the reference model is loaded before the first step"
            with torch.no_grad():
                reference_B2 = of_pairs(self.reference, batch)
        # The likelihood term needs the log-probability itself, not only its difference to the reference.
        rewards_B2 = self.config.task.beta * (answers_B2 - reference_B2)
        return torch.cat((rewards_B2, answers_B2[:, :1]), dim=1)

    def loss_sum(self, outputs: Tensor, batch: RowBatch, weight: Tensor) -> Tensor:
        """Return the weighted sum over pairs of ``pair_losses``, and of the chosen answer's mean negative
        log-probability times ``task.nll_weight``."""
        task = self.config.task
        lengths_B2 = answer_lengths(batch)
        losses_B = pair_losses(outputs[:, :2], lengths_B2, task)
        if task.nll_weight:
            losses_B = losses_B - task.nll_weight * outputs[:, 2] / lengths_B2[:, 0]
        return weight * losses_B.sum()


def pair_losses(rewards_B2: Tensor, lengths_B2: Tensor, task: TaskOptions) -> Tensor:
    """Return the loss of each pair, (B,), of the kind ``task.loss_type``.

    - "sigmoid": -log sigmoid(difference of rewards) (Rafailov et al. 2023, equation 7). With
      ``task.label_smoothing`` e, (1 - e) times that plus e times the loss of the exchanged pair: conservative
      DPO (Mitchell 2023).
    - "robust": an estimate of the loss without exchanged pairs, if a share e of them is exchanged (Chowdhury
      et al. 2024).
    - "hinge": max(0, 1 - difference) (SLiC, Zhao et al. 2023).
    - "ipo": (difference of mean log-ratios - 1 / (2 beta))^2 (Azar et al. 2023, equation 17; mean per token as
      in TRL).
    - "sigmoid_norm": "sigmoid" with the mean reward per token.

    Args:
        rewards_B2: beta times the log-ratios, the chosen answer first.
        lengths_B2: number of tokens of each answer.
    """
    difference_B = rewards_B2[:, 0] - rewards_B2[:, 1]
    means_B2 = rewards_B2 / lengths_B2
    mean_difference_B = means_B2[:, 0] - means_B2[:, 1]
    # These losses do not use label smoothing. The configuration rejects the pair.
    if task.loss_type == "hinge":
        return torch.relu(1 - difference_B)
    if task.loss_type == "ipo":
        return (mean_difference_B / task.beta - 1 / (2 * task.beta)) ** 2
    if task.loss_type == "sigmoid_norm":
        return -F.logsigmoid(mean_difference_B)

    smoothing = task.label_smoothing
    as_labeled_B = -F.logsigmoid(difference_B)
    if not smoothing:
        return as_labeled_B
    # Loss of the pair with its answers exchanged.
    exchanged_B = -F.logsigmoid(-difference_B)
    if task.loss_type == "robust":
        return ((1 - smoothing) * as_labeled_B - smoothing * exchanged_B) / (1 - 2 * smoothing)
    return (1 - smoothing) * as_labeled_B + smoothing * exchanged_B


Task = Preference
