"""Measure the loss on validation data with the training runner. The result is exact on any number of ranks.

Every row of the validation set is read once. Every rank must run the same number of batches. If the rows
cannot be divided evenly, padding rows without targets fill the last batch. Validation does not affect
training: dropout is off, and expert load statistics are updated only in backward. For row tasks, such as
classification, all ranks gather the predictions in the order of the data,
and compute metrics over the complete set.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardtrain import data, tasks
from shardtrain.config import derived
from shardtrain.config.schema import Config, Validation
from shardtrain.config.schema.task_options import OF_NEXT_TOKENS
from shardtrain.distributed import BATCH_AXES, LOSS_AXES, Mesh, Runner
from shardtrain.distributed.fsdp import free_gathered
from shardtrain.distributed.task_runner import TaskRunner
from shardtrain.launch.stop_request import Interrupted, StopRequest
from shardtrain.ops.accelerator import sum_dtype
from shardtrain.train.open_together import require_same_data, together
from shardtrain.utils import activity
from shardtrain.utils.errors import ConfigError, DataError, Problem
from shardtrain.utils.log import logger


@dataclass(frozen=True)
class Evaluation:
    """Results of one pass over the validation data, equal on all ranks."""

    loss: float
    """Mean over the target tokens, in nats."""
    tokens: int
    """Number of target tokens."""
    rows: int
    """Number of sequences, without padding rows."""
    metrics: Mapping[str, float] | None = None
    """Metrics of a row task. None for next-token tasks, which have a perplexity instead."""
    predictions: Mapping[str, Tensor] = field(default_factory=dict)
    """Predictions of a row task, as CPU tensors with one entry per row, in the order of the data."""

    @property
    def perplexity(self) -> float:
        """The exponential of the loss. Infinite if it exceeds a float's range, NaN if the loss is NaN."""
        if self.loss < 709:
            return math.exp(self.loss)
        return self.loss * math.inf

    @property
    def values(self) -> dict[str, float]:
        """Values to log: the loss, and the perplexity or the metrics of the task."""
        if self.metrics is None:
            return {"loss": self.loss, "perplexity": self.perplexity}
        return {"loss": self.loss, **self.metrics}


def evaluate(
    runner: Runner,
    stream: data.DataLoader,
    mesh: Mesh,
    max_batches: int = -1,
    stop: StopRequest | None = None,
    labelled: bool = True,
) -> Evaluation | None:
    """Measure the loss on a finite stream, from its beginning (a collective).

    Weights, gradients and random number generators do not change.

    Args:
        runner: the runner of the model.
        stream: the validation data.
        mesh: the mesh.
        max_batches: maximum number of batches to read. -1 reads all batches.
        stop: checked before each batch. If any rank has received a request to stop, all ranks return None.
        labelled: False if the rows of a row task have no labels. The loss is then NaN, and there are no
            metrics.

    Raises:
        DataError: no sequence has a target token.
    """
    stream.seek(0)
    loss = torch.zeros((), dtype=sum_dtype(mesh.device), device=mesh.device)
    num_tokens = num_rows = 0
    local_predictions: list[tuple[Tensor, dict[str, Tensor]]] = []
    training_modes = [(part, part.training) for part in runner.parts]
    batch = None
    try:
        for part in runner.parts:
            part.eval()
        for batch in _batches(stream, max_batches, mesh, stop or StopRequest()):
            num_tokens += batch.num_targets
            num_rows += int((batch.sample_ids_B >= 0).sum())
            device_batch = batch.to(mesh.device, non_blocking=True)
            if isinstance(runner, TaskRunner):
                batch_loss, predictions = runner.predict(device_batch, labelled)
                local_predictions.append((batch.sample_ids_B, predictions))
            else:
                batch_loss = runner.evaluate(device_batch)
            loss += batch_loss
    except Interrupted:
        return None
    finally:
        for part, was_training in training_modes:
            part.train(was_training)
            # Reshard the parameters, because no backward pass follows that would do it. Before any forward
            # pass there is nothing to reshard.
            if batch is not None:
                free_gathered(part)
        # This also ends the worker processes.
        stream.seek(0)
    # Ranks that differ only along other axes than BATCH_AXES read the same rows, so sum the counts only over
    # BATCH_AXES. But each rank along "pp" and LOSS_AXES has a different part of the loss.
    counts = torch.tensor([num_tokens, num_rows], dtype=sum_dtype(mesh.device), device=mesh.device)
    total_tokens, total_rows = mesh.sum(counts, over=BATCH_AXES).tolist()
    total_loss = mesh.sum(loss, over=("pp", *LOSS_AXES)).item()
    if isinstance(runner, TaskRunner):
        predictions = gather(local_predictions, mesh)
        metrics = runner.task.metrics(predictions) if labelled else {}
        mean_loss = total_loss / total_tokens if labelled and total_tokens else math.nan
        return Evaluation(mean_loss, int(total_tokens), int(total_rows), metrics, predictions)
    if not total_tokens:
        raise DataError(
            f"validation: none of the {total_rows:.0f} sequences has a target token; use other data"
        )
    return Evaluation(total_loss / total_tokens, int(total_tokens), int(total_rows))


def gather(
    local_predictions: list[tuple[Tensor, dict[str, Tensor]]], mesh: Mesh
) -> dict[str, Tensor]:
    """Gather the predictions of all ranks as CPU tensors, with one entry per row (a collective).

    Rows are ordered by sample id. Padding rows (id -1) are dropped. If several ranks have the same row,
    such as tensor-parallel ranks, it is kept once.

    Args:
        local_predictions: for each batch of this rank, its sample ids and its predictions by name. Ranks may
            have different numbers of rows, or none.
        mesh: the mesh.
    """
    # Select this rank's rows without padding.
    ids_of_batches = []
    values_of_batches: dict[str, list[Tensor]] = {name: [] for name in local_predictions[0][1]}
    for batch_ids, predictions in local_predictions:
        is_row = batch_ids >= 0
        ids_of_batches.append(batch_ids[is_row])
        for name, values in predictions.items():
            values_of_batches[name].append(values.cpu()[is_row])
    local_ids = torch.cat(ids_of_batches)
    local_values = {name: torch.cat(values) for name, values in values_of_batches.items()}

    # Sort the rows of all ranks by id, and keep the first of equal ids.
    ids = torch.cat(_all_gather(local_ids, mesh))
    order = ids.argsort(stable=True)
    sorted_ids = ids[order]
    is_first = torch.ones(len(ids), dtype=torch.bool)
    is_first[1:] = sorted_ids[1:] != sorted_ids[:-1]
    rows = order[is_first]
    gathered = {}
    for name, values in local_values.items():
        gathered[name] = torch.cat(_all_gather(values, mesh))[rows]
    return gathered


def _all_gather(values: Tensor, mesh: Mesh) -> list[Tensor]:
    """All-gather tensors whose first dimension may differ between ranks. Return one CPU tensor per rank."""
    world_size = mesh.device_mesh.size()
    if world_size == 1:
        return [values]
    values = values.to(mesh.device)
    counts = torch.zeros(world_size, dtype=torch.int64, device=mesh.device)
    counts[torch.distributed.get_rank()] = len(values)
    lengths = mesh.sum_of_all(counts).tolist()
    # all_gather requires equal shapes, so pad each tensor to the length of the longest one.
    padded = values.new_zeros(max(lengths), *values.shape[1:])
    padded[: len(values)] = values
    gathered = [torch.empty_like(padded) for _ in lengths]
    torch.distributed.all_gather(gathered, padded)
    return [part[:length].cpu() for part, length in zip(gathered, lengths, strict=True)]


def _batches(
    stream: data.DataLoader, limit: int, mesh: Mesh, stop: StopRequest
) -> Iterator[data.Batch]:
    """Yield at most ``limit`` batches, or all if it is negative (a collective).

    Every rank yields the same number of batches.

    Raises:
        Interrupted: a rank has received a request to stop. All ranks raise it before the same batch.
    """
    count = 0
    while count != limit:
        # stop.read returns None if a request to stop has ended the wait. The end of the data is (None,).
        result = stop.read(lambda: (next(stream, None),))
        is_interrupted = result is None
        batch = result[0] if result else None
        has_ended = stream.has_ended if is_interrupted else batch is None
        if has_ended:
            return
        interrupted_ranks = mesh.sum_of_all(torch.tensor(float(is_interrupted), device=mesh.device))
        if interrupted_ranks.item():
            raise Interrupted
        assert batch is not None
        yield batch
        activity.tick()
        count += 1


class Validator:
    """Evaluates the model on the validation data, after the steps that ``[validation]`` configures."""

    def __init__(
        self,
        config: Config,
        runner: Runner,
        mesh: Mesh,
        stop: StopRequest | None = None,
        num_samples: int | None = None,
        weights: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Open the validation data.

        Args:
            config: the configuration of the run.
            runner: the runner of the model.
            mesh: the mesh.
            stop: ends an evaluation early, see ``evaluate``.
            num_samples: number of rows in an epoch of the training data. None if unknown.
            weights: returns a context manager that replaces the weights inside the block, for example by
                their averages.

        Raises:
            ConfigError: ``validation.per_epoch`` is set, but the number of training rows is unknown.
        """
        self._weights = weights
        self._options = config.validation
        self._runner = runner
        self._mesh = mesh
        self._stop = stop
        self._rows_per_epoch = num_samples
        self._step_sizes = derived.step_sizes(config, mesh.device_mesh.size())
        if self._options.per_epoch and num_samples is None:
            raise ConfigError(
                Problem(
                    "validation.per_epoch",
                    self._options.per_epoch,
                    rule="requires the number of training rows, which is unknown until these data are read",
                    fix="use validation.freq",
                )
            )
        self._stream = open_dataloader(config, mesh)
        self._last_step = 0

    def is_due(self, step: int, total_steps: int) -> bool:
        """True if the run must evaluate after ``step``: at each interval, and after the last step.

        Steps are counted from 1. A step that has been evaluated is not due again. So this may be called again
        for the same step, when the data have ended early and it turns out to be the last one.
        """
        if step == self._last_step:
            return False
        rows = self._rows_per_epoch
        if self._options.per_epoch and rows:
            # Evaluation is due if this step reaches or passes a multiple of rows / per_epoch.
            rows_until_step = self._step_sizes.after(0, step)
            rows_before_step = self._step_sizes.after(0, step - 1)
            evaluations_until_step = rows_until_step * self._options.per_epoch // rows
            evaluations_before_step = rows_before_step * self._options.per_epoch // rows
            is_at_interval = evaluations_until_step > evaluations_before_step
        else:
            is_at_interval = step % self._options.freq == 0
        return is_at_interval or step == total_steps

    def run(self, step: int) -> Evaluation | None:
        """Evaluate after ``step`` on ``validation.steps`` batches, or on the complete set (a collective).

        Returns None if a request to stop cancelled the evaluation.
        """
        self._last_step = step
        with self._weights():
            return evaluate(self._runner, self._stream, self._mesh, self._options.steps, self._stop)


def open_dataloader(config: Config, mesh: Mesh) -> data.DataLoader:
    """Open the validation set for one pass without shuffling (a collective).

    Its rows are divided among the data-parallel ranks.
    """
    with together(config):
        stream = tasks.open_task(config).open_dataloader(
            section=section(config, mesh.device_mesh.size()),
            batch_rank=mesh.rank(*BATCH_AXES),
            num_batch_ranks=mesh.size(*BATCH_AXES),
            accumulation=1,
            shuffle=False,
            loop=False,
        )
    require_same_data(stream, "the validation data")
    v = config.validation
    interval = f"{v.per_epoch} times an epoch" if v.per_epoch else f"every {v.freq} steps"
    length = (
        f"{v.seq_len} tokens" if config.task.name in OF_NEXT_TOKENS else f"up to {v.seq_len} tokens"
    )
    logger.info(
        f"validation: {stream.num_samples} sequences of {length}, {interval} and after the last"
    )
    return stream


def section(config: Config, world_size: int) -> Validation:
    """Return the validation options, with the batch size that the mesh needs.

    With pipeline parallelism, a validation batch has as many rows as a training step, to fill the pipeline.
    """
    if config.parallelism.pipeline_parallel_degree == 1:
        return config.validation
    rows = config.training.local_batch_size * derived.accumulation_steps(config, world_size)
    return dataclasses.replace(config.validation, local_batch_size=rows)
