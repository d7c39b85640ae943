"""A runner for tasks. The task defines batches, loss and predictions. The model is sharded as usual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardtrain.distributed import expert_parallel
from shardtrain.distributed.mesh import LOSS_AXES
from shardtrain.distributed.runner import PlainRunner, Runner


class TaskLoss(Protocol):
    """Interface of a task (``tasks.RowTask``) that a runner uses."""

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Run the model on a batch and return its outputs."""
        ...

    def loss_sum(self, outputs: Any, batch: Any, weight: Tensor) -> Tensor:
        """Return ``weight`` times the sum of the loss over the batch's targets."""
        ...

    def predictions(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        """Return the tensors that ``metrics`` needs, with one entry for each row of the batch."""
        ...

    def metrics(self, rows: Any) -> dict[str, float]:
        """Compute metrics from the predictions for all rows of a set."""
        ...

    def step_sums(self, outputs: Any, batch: Any) -> Tensor | None:
        """Return sums over the rows of a batch for ``step_metrics``, (K,) in float64, or None if unused."""
        ...

    def step_metrics(self, sums: list[float]) -> dict[str, float]:
        """Compute metrics of a training step from the sums over all its rows."""
        ...


class TaskRunner(PlainRunner):
    """Runner for a task, of a model without pipeline stages. Batches are ``data.row_stream.RowBatch``."""

    def __init__(self, plain: Runner, task: TaskLoss) -> None:
        super().__init__(plain.model_parts)
        self.task = task
        self._step_sums_K: Tensor | None = None

    @property
    def counts_filler(self) -> bool:
        """Always False, because the task itself marks padding tokens for the model."""
        return False

    def local_targets(self, batches: Sequence[Any]) -> int:
        return sum(batch.num_targets for batch in batches)

    def forward_backward(self, batches: Sequence[Any], weight: Tensor) -> Tensor:
        self._step_sums_K = None
        return super().forward_backward(batches, weight)

    def measures(self) -> dict[str, float]:
        """Return the measures with the task's metrics of the step, over all ranks' rows (a collective)."""
        measures = super().measures()
        if self._step_sums_K is not None:
            sums = self._mesh.sum(self._step_sums_K, over=LOSS_AXES).tolist()
            measures |= self.task.step_metrics(sums)
        return measures

    def predict(self, batch: Any, with_loss: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss sum of a batch and the predictions for its rows, without gradients.

        The loss is zero if ``with_loss`` is False.
        """
        with torch.no_grad():
            outputs = self.task.forward(self.parts[0], batch)
            loss = torch.zeros((), device=self._mesh.device)
            if with_loss:
                weight = _weight(batch, torch.ones_like(loss))
                loss = self.task.loss_sum(outputs, batch, weight)
            return loss.float(), self.task.predictions(outputs, batch)

    def _loss(self, batch: Any, weight: Tensor) -> Tensor:
        # A rank without data runs a batch without rows to take part in collectives. Experts must not count
        # it.
        if self._has_experts:
            expert_parallel.count(self.parts, bool(batch.num_rows))
        outputs = self.task.forward(self.parts[0], batch)
        self._count(outputs, batch)
        return self.task.loss_sum(outputs, batch, _weight(batch, weight)).float()

    def _count(self, outputs: Any, batch: Any) -> None:
        with torch.no_grad():
            sums_K = self.task.step_sums(outputs, batch)
        if sums_K is None:
            return
        # A batch without rows contributes zeros, because every rank needs sums for the collective.
        sums_K = sums_K * bool(batch.num_rows)
        self._step_sums_K = sums_K if self._step_sums_K is None else self._step_sums_K + sums_K


def _weight(batch: Any, weight: Tensor) -> Tensor:
    """Return ``weight``, or zero for a batch without rows."""
    return weight if batch.num_rows else torch.zeros_like(weight)
