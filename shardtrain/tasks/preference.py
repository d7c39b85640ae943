"""Preferences: of two answers to a prompt one was chosen; the model learns to find it likelier than it did at first.

Direct preference optimisation (Rafailov et al. 2023, equation 7). With the log-probability of an answer under the model
and under the reference, which is the model as the run began, frozen: an answer's reward is beta times the difference of
the two, and a pair's loss is -log sigmoid(reward of the chosen - reward of the rejected), summed over pairs and divided
once by the pairs of the whole step.

The reference is a second copy of the weights on the same mesh (``train/reference_models.py``), so it costs their memory
once more, without gradients. ``simpo.py`` and ``orpo.py`` need none; ``kto.py`` needs no pairs.
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
    """The task ``preference``; ``reference`` is the frozen model, put there before the first step."""

    needs_reference = True

    def forward(self, model: nn.Module, batch: RowBatch) -> Tensor:
        """Rewards (B, 2), of the chosen answer first."""
        assert self.reference is not None, "the reference is opened before the first step"
        with torch.no_grad():
            before_B2 = of_pairs(self.reference, batch)
        rewards_B2: Tensor = self.config.task.beta * (of_pairs(model, batch) - before_B2)
        return rewards_B2

    def loss_sum(self, outputs: Tensor, batch: RowBatch, weight: Tensor) -> Tensor:
        """-log sigmoid of the margins, over pairs."""
        return -weight * F.logsigmoid(outputs[:, 0] - outputs[:, 1]).sum()


Task = Preference
