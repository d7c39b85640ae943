"""The loss on held-out data, by the runner that trains; exact at any number of ranks, and without a trace in training.

Each row of the set is read once, whatever the number of ranks: where they do not divide it, the last batch is filled up
with rows that have no targets, so that every rank takes part in the same number of batches. Dropout is off meanwhile.
Blocks of experts count tokens in backward alone, so the biases of their routers see nothing of this. Of a task of rows
the predictions of all rows come together in the order of the data, and its metrics are those of the whole set.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardtrain import data, tasks
from shardtrain.config import derived
from shardtrain.config.schema import Config, Validation
from shardtrain.config.schema.task import OF_NEXT_TOKENS
from shardtrain.distributed import BATCH_AXES, LOSS_AXES, Mesh, Runner
from shardtrain.distributed.fsdp import free_gathered
from shardtrain.distributed.task_runner import TaskRunner
from shardtrain.launch.stop_request import Interrupted, StopRequest
from shardtrain.train.open_together import require_same_data, together
from shardtrain.utils import activity
from shardtrain.utils.errors import ConfigError, DataError, Problem
from shardtrain.utils.log import logger


@dataclass(frozen=True)
class Evaluation:
    """What one pass came to, equal on all ranks."""

    loss: float
    """Mean over the target tokens, in nats."""
    tokens: int
    """Target tokens."""
    rows: int
    """Sequences, without those that fill up the last batch."""
    metrics: Mapping[str, float] | None = None
    """Of a task of rows: what it measures beside the loss."""
    predictions: Mapping[str, Tensor] = field(default_factory=dict)
    """Of a task of rows: what it predicts, one entry per row in the order of the data, on the CPU."""

    @property
    def perplexity(self) -> float:
        """The exponential of the loss; infinite where a float cannot hold it."""
        return math.exp(self.loss) if self.loss < 709 else self.loss * math.inf  # nan stays nan

    @property
    def values(self) -> dict[str, float]:
        """What is logged: the loss with its perplexity, or with the metrics of the task."""
        return {"loss": self.loss, **({"perplexity": self.perplexity} if self.metrics is None else self.metrics)}


def evaluate(
    runner: Runner,
    stream: data.DataLoader,
    mesh: Mesh,
    max_batches: int = -1,
    stop: StopRequest | None = None,
    labelled: bool = True,
) -> Evaluation | None:
    """Read a stream that ends from its beginning, and measure the loss (a collective: every rank calls it).

    ``max_batches`` ends it early; -1 reads all. Weights, gradients and random numbers stay as they are. Gives None, on
    all ranks, where ``stop`` of one of them says that it was asked to stop. Where a task's rows are not ``labelled``
    there is neither a loss (it is nan) nor a metric.

    Raises:
        DataError: when the set has no target token.
    """
    stream.seek(0)
    loss = torch.zeros((), dtype=torch.float64, device=mesh.device)
    tokens = rows = 0
    found: list[tuple[Tensor, dict[str, Tensor]]] = []
    modes = [(part, part.training) for part in runner.parts]
    batch = None
    try:
        for part in runner.parts:
            part.eval()
        for batch in _batches(stream, max_batches, mesh, stop or StopRequest()):
            tokens += batch.num_targets
            rows += int((batch.sample_ids_B >= 0).sum())
            moved = batch.to(mesh.device, non_blocking=True)
            if isinstance(runner, TaskRunner):
                part_loss, predictions = runner.predict(moved, labelled)
                found.append((batch.sample_ids_B, predictions))
            else:
                part_loss = runner.evaluate(moved)
            loss += part_loss
    except Interrupted:
        return None
    finally:
        for part, was_training in modes:
            part.train(was_training)
            if batch is not None:  # FSDP has no state to free before the first forward of a process
                free_gathered(part)  # no backward follows that would; what reads parameters next must find own shards
        stream.seek(0)  # ends the processes that prepare batches
    # peers of other axes read the same rows: counts are added over data ranks alone, losses over all that have a part
    counts = torch.tensor([tokens, rows], dtype=torch.float64, device=mesh.device)
    total_tokens, total_rows = mesh.sum(counts, over=BATCH_AXES).tolist()
    total = mesh.sum(loss, over=("pp", *LOSS_AXES)).item()
    if isinstance(runner, TaskRunner):
        predictions = gather(found, mesh)
        metrics = runner.task.metrics(predictions) if labelled else {}
        mean = total / total_tokens if labelled and total_tokens else math.nan
        return Evaluation(mean, int(total_tokens), int(total_rows), metrics, predictions)
    if not total_tokens:
        raise DataError(f"validation: none of the {total_rows:.0f} sequences has a token to predict; use other data")
    return Evaluation(total / total_tokens, int(total_tokens), int(total_rows))


def gather(found: list[tuple[Tensor, dict[str, Tensor]]], mesh: Mesh) -> dict[str, Tensor]:
    """Predictions of all ranks' batches, each with its sample ids, one entry per row in the order of ids, on the CPU.

    A collective. Ranks may have different numbers of rows, none among them; filler rows (id -1) are left out, and of
    rows that several ranks hold alike, as tensor-parallel peers do, one is taken.
    """
    # this rank's rows without filler
    kept = [(ids >= 0).nonzero().flatten() for ids, _ in found]
    ids = torch.cat([ids[rows] for (ids, _), rows in zip(found, kept, strict=True)])
    own = {
        name: torch.cat([part[name].cpu()[rows] for (_, part), rows in zip(found, kept, strict=True)])
        for name in found[0][1]
    }
    ids = torch.cat(_gather(ids, mesh))
    # of equal ids, which peers hold alike, the first
    order = ids.argsort(stable=True)
    first = torch.ones(len(ids), dtype=torch.bool)
    first[1:] = ids[order][1:] != ids[order][:-1]
    return {name: torch.cat(_gather(values, mesh))[order[first]] for name, values in own.items()}


def _gather(values: Tensor, mesh: Mesh) -> list[Tensor]:
    """A tensor of each rank, whose first dims may differ."""
    size = mesh.device_mesh.size()
    if size == 1:
        return [values]
    values = values.to(mesh.device)
    counts = torch.zeros(size, dtype=torch.int64, device=mesh.device)
    counts[torch.distributed.get_rank()] = len(values)
    lengths = mesh.sum_of_all(counts).tolist()
    # all_gather takes tensors of one shape, so each is padded to the longest
    padded = values.new_zeros(max(lengths), *values.shape[1:])
    padded[: len(values)] = values
    every = [torch.empty_like(padded) for _ in lengths]
    torch.distributed.all_gather(every, padded)
    return [part[:length].cpu() for part, length in zip(every, lengths, strict=True)]


def _batches(stream: data.DataLoader, limit: int, mesh: Mesh, stop: StopRequest) -> Iterator[data.Batch]:
    """The batches of a stream that ends, or ``limit`` of them where it is not below 0; all ranks agree on each.

    Raises:
        Interrupted: on all ranks before the same batch, when one of them was asked to stop.
    """
    count = 0
    while count != limit:
        # in a tuple: None alone is a wait that a request to stop has ended, and (None,) the end of the data
        found = stop.read(lambda: (next(stream, None),))
        batch = found[0] if found else None
        if batch is None if found else stream.has_ended:
            return
        if mesh.sum_of_all(torch.tensor(0.0 if found else 1.0, device=mesh.device)).item():
            raise Interrupted
        assert batch is not None
        yield batch
        activity.tick()
        count += 1


class Validator:
    """Held-out data of a run, and when to evaluate on them."""

    def __init__(
        self,
        config: Config,
        runner: Runner,
        mesh: Mesh,
        stop: StopRequest | None = None,
        num_samples: int | None = None,
    ) -> None:
        self._options = config.validation
        self._runner = runner
        self._mesh = mesh
        self._stop = stop
        self._epoch_rows = num_samples
        self._step_rows = derived.global_batch_size(config, mesh.device_mesh.size())
        if self._options.per_epoch and num_samples is None:
            rule = "needs the number of training rows, and is known only after reading these data"
            raise ConfigError(Problem("validation.per_epoch", self._options.per_epoch, rule, "use validation.freq"))
        self._stream = open_dataloader(config, mesh)
        self._last_step = 0

    def is_due(self, step: int, total_steps: int) -> bool:
        """Whether to evaluate after ``step`` (1 is the first), as ``validation.freq`` or per_epoch says, or last.

        No step is due twice, so one may ask again where the data end before the last step.
        """
        # due where a multiple of rows / per_epoch lies between the step before and this one
        rows = self._epoch_rows
        if self._options.per_epoch and rows:
            done = step * self._step_rows * self._options.per_epoch // rows
            before = (step - 1) * self._step_rows * self._options.per_epoch // rows
            due = done > before
        else:
            due = step % self._options.freq == 0
        return (due or step == total_steps) and step != self._last_step

    def run(self, step: int) -> Evaluation | None:
        """Evaluate after ``step`` on ``validation.steps`` batches, or on the whole set (a collective).

        None where the run was asked to stop before it was done.
        """
        self._last_step = step
        return evaluate(self._runner, self._stream, self._mesh, self._options.steps, self._stop)


def open_dataloader(config: Config, mesh: Mesh) -> data.DataLoader:
    """The validation set in its own order, once, dealt to the data-parallel ranks (a collective)."""
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
    when = f"{v.per_epoch} times an epoch" if v.per_epoch else f"every {v.freq} steps"
    of = f"of {v.seq_len} tokens" if config.task.name in OF_NEXT_TOKENS else f"of up to {v.seq_len} tokens"
    logger.info(f"validation: {stream.num_samples} sequences {of}, {when} and at the last")
    return stream


def section(config: Config, world_size: int) -> Validation:
    """The validation options, with the rows per batch that the runner takes: a pipeline wants those of a whole step."""
    if config.parallelism.pipeline_parallel_degree == 1:
        return config.validation
    rows = config.training.local_batch_size * derived.accumulation_steps(config, world_size)
    return dataclasses.replace(config.validation, local_batch_size=rows)
