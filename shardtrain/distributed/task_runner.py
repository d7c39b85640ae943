"""A runner whose loss a task gives: the model is sharded as ever, and what goes in and comes out is the task's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardtrain.distributed import expert_parallel
from shardtrain.distributed.runner import PlainRunner, Runner


class TaskLoss(Protocol):
    """What a runner needs of a task (``tasks.RowTask``)."""

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Outputs of the model."""
        ...

    def loss_sum(self, outputs: Any, batch: Any, weight: Tensor) -> Tensor:
        """The weighted sum of the loss over the batch's targets."""
        ...

    def predictions(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        """What evaluation keeps of each row."""
        ...

    def metrics(self, rows: Any) -> dict[str, float]:
        """Metrics of a whole set."""
        ...


class TaskRunner(PlainRunner):
    """The same parts of a model under the loss of a task; batches are ``data.row_stream.RowBatch``."""

    def __init__(self, plain: Runner, task: TaskLoss) -> None:
        super().__init__(plain.model_parts)
        self.task = task

    @property
    def counts_filler(self) -> bool:
        """Not of the batch: the task tells the model itself."""
        return False

    def local_targets(self, batches: Sequence[Any]) -> int:
        return sum(batch.num_targets for batch in batches)

    def predict(self, batch: Any, with_loss: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
        """This rank's loss sum of one batch, and the task's predictions for its rows, without gradients."""
        with torch.no_grad():
            outputs = self.task.forward(self.parts[0], batch)
            one = torch.ones((), device=self._mesh.device)
            loss = self.task.loss_sum(outputs, batch, _weight(batch, one)) if with_loss else torch.zeros_like(one)
            return loss.float(), self.task.predictions(outputs, batch)

    def _loss(self, batch: Any, weight: Tensor) -> Tensor:
        if self._has_experts:
            expert_parallel.count(self.parts, bool(batch.num_rows))
        outputs = self.task.forward(self.parts[0], batch)
        return self.task.loss_sum(outputs, batch, _weight(batch, weight)).float()


def _weight(batch: Any, weight: Tensor) -> Tensor:
    """The weight of a batch: nothing where its row is filler, which is there for the collectives."""
    return weight if batch.num_rows else torch.zeros_like(weight)
