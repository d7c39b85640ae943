"""Runner for distillation: a student learns from a frozen teacher on the same mesh.

Validation uses only the student.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardtrain.distributed.context_parallel import cores as context_parallel
from shardtrain.distributed.context_parallel.cores import TokenBatch
from shardtrain.distributed.fsdp import free_gathered
from shardtrain.distributed.mesh import LOSS_AXES
from shardtrain.distributed.runner import PlainRunner, Runner
from shardtrain.ops.accelerator import sum_dtype
from shardtrain.ops.distillation_loss import Mix, distillation_sum
from shardtrain.ops.targets import IGNORE


class DistillationRunner(PlainRunner):
    """Runner of a student without pipeline stages. The caller must set ``teacher`` before the first step."""

    def __init__(self, plain: Runner, mix: Mix) -> None:
        super().__init__(plain.model_parts)
        self.teacher: nn.Module | None = None
        self._mix = mix
        self._sums_3 = torch.zeros(3, dtype=sum_dtype(self._mesh.device), device=self._mesh.device)

    def forward_backward(self, batches: Sequence[TokenBatch], weight: Tensor) -> Tensor:
        self._sums_3.zero_()
        return super().forward_backward(batches, weight)

    def evaluate(self, batch: TokenBatch) -> Tensor:
        """Return the sum of the student's cross-entropy, which is comparable with other runs."""
        with torch.no_grad():
            return super()._loss(batch, torch.ones((), device=self._mesh.device))

    def measures(self) -> dict[str, float]:
        """Return the measures of the step, with ``cross_entropy`` and ``divergence`` (a collective).

        Both are means over the target tokens of the step, in nats.
        """
        loss, divergence, count = self._mesh.sum(self._sums_3, over=LOSS_AXES).tolist()
        num_targets = max(count, 1)
        measures = super().measures()
        measures["cross_entropy"] = loss / num_targets
        measures["divergence"] = divergence / num_targets
        return measures

    def _loss(self, batch: TokenBatch, weight: Tensor) -> Tensor:
        assert self.teacher is not None, "the teacher is opened before the first step"
        tokens_Bt, targets_Bt, positions_Bt = self._cut(batch)
        documents = context_parallel.document_argument([batch])
        # Free the teacher's gathered weights right away, because the student's pass needs the memory.
        with torch.no_grad():
            teacher_BtV = self.teacher(tokens_Bt, positions_Bt, **documents)
            free_gathered(self.teacher)
        logits_BtV = self.parts[0](tokens_Bt, positions_Bt, **documents)
        loss, sums_2 = distillation_sum(
            logits_BtV, teacher_BtV, targets_Bt, self._mix, weight, self._vocabulary
        )
        self._sums_3[:2] += sums_2
        self._sums_3[2] += (targets_Bt != IGNORE).sum()
        return loss
