"""SimPO: preference optimization without a reference model (Meng et al. 2024, arXiv 2405.14734, equation
6).

The reward of an answer is beta times the mean log-probability of its tokens, so long answers have no
advantage. The loss of a pair is -log sigmoid(reward of chosen - reward of rejected - gamma), summed over
pairs and divided once by the pairs of the step. The paper uses ``task.beta`` from 2 to 10, much larger than
DPO, and ``task.gamma`` up to half of it.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.data.row_stream import RowBatch
from shardtrain.tasks._answers import PairTask, answer_lengths, of_pairs

METRICS = {"reward_accuracy": "max", "reward_margin": "max"}
DEGREES = ("tensor_parallel_degree",)


class SimPO(PairTask):
    """Simple preference optimization (SimPO): a preference loss without a reference model."""

    def forward(self, model: nn.Module, batch: RowBatch) -> Tensor:
        """Return the rewards (B, 2), the chosen answer first."""
        rewards_B2: Tensor = self.config.task.beta * of_pairs(model, batch) / answer_lengths(batch)
        return rewards_B2

    def loss_sum(self, outputs: Tensor, batch: RowBatch, weight: Tensor) -> Tensor:
        """Return the weighted sum over pairs of -log sigmoid(reward difference - gamma).

        With ``task.nll_weight``, add that multiple of the chosen answer's mean negative log-probability, as
        CPO-SimPO does.
        """
        task = self.config.task
        losses_B = -F.logsigmoid(outputs[:, 0] - outputs[:, 1] - task.gamma)
        # Outputs contain beta times the mean log-probability, so divide by beta.
        if task.nll_weight:
            losses_B = losses_B - task.nll_weight / task.beta * outputs[:, 0]
        return weight * losses_B.sum()


Task = SimPO
