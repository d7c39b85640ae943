"""DPO: learn from pairs of a chosen and a rejected answer to a prompt (Rafailov et al. 2023, equation 7).

The reward of an answer is beta times the difference of its log-probabilities under the model and under the
reference, which is the frozen initial model. The loss of a pair is -log sigmoid(reward of chosen - reward
of rejected), summed over pairs and divided once by the pairs of the step.

The reference is a second copy of the weights on the same mesh (``train/reference_models.py``), without
gradients. ``simpo.py`` and ``orpo.py`` need no reference; ``kto.py`` needs no pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.data.row_stream import RowBatch
from shardtrain.tasks._answers import Pair, PairTask, of_pairs

__all__ = ["Pair", "Preference", "Task"]

METRICS = {"reward_accuracy": "max", "reward_margin": "max"}
DEGREES = ("tensor_parallel_degree",)


class Preference(PairTask):
    """The task ``preference``."""

    needs_reference = True

    def forward(self, model: nn.Module, batch: RowBatch) -> Tensor:
        """Return the rewards (B, 2), the chosen answer first."""
        assert self.reference is not None, "the reference model is loaded before the first step"
        with torch.no_grad():
            reference_B2 = of_pairs(self.reference, batch)
        rewards_B2: Tensor = self.config.task.beta * (of_pairs(model, batch) - reference_B2)
        return rewards_B2

    def loss_sum(self, outputs: Tensor, batch: RowBatch, weight: Tensor) -> Tensor:
        """Return the weighted sum over pairs of -log sigmoid(reward difference)."""
        return -weight * F.logsigmoid(outputs[:, 0] - outputs[:, 1]).sum()


Task = Preference
