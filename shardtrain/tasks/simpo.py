"""Preferences without a reference: SimPO (Meng et al. 2024, arXiv 2405.14734, equation 6).

An answer's reward is beta times the mean log-probability of its tokens, so that length earns nothing, and a pair's loss
is -log sigmoid(reward of the chosen - reward of the rejected - gamma), summed over pairs and divided once by the pairs
of the whole step. The paper takes ``task.beta`` 2 to 10, much above that of DPO, and ``task.gamma`` half of it or less.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.data.row_stream import RowBatch
from shardtrain.ops.targets import IGNORE
from shardtrain.tasks._answers import PairTask, of_pairs

METRICS = {"reward_accuracy": "max", "reward_margin": "max"}
DEGREES = ("tensor_parallel_degree",)


class SimPO(PairTask):
    """The task ``simpo``."""

    def forward(self, model: nn.Module, batch: RowBatch) -> Tensor:
        """Rewards (B, 2), of the chosen answer first."""
        counts_B2 = (batch["targets_B2T"] != IGNORE).sum(-1)
        rewards_B2: Tensor = self.config.task.beta * of_pairs(model, batch) / counts_B2
        return rewards_B2

    def loss_sum(self, outputs: Tensor, batch: RowBatch, weight: Tensor) -> Tensor:
        """-log sigmoid of the margins above gamma, over pairs."""
        return -weight * F.logsigmoid(outputs[:, 0] - outputs[:, 1] - self.config.task.gamma).sum()


Task = SimPO
