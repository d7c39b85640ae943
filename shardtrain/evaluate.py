"""The loss on held-out data, by the runner that trains; exact at any number of ranks, and without a trace in training.

Each row of the set is read once, whatever the number of ranks: where they do not divide it, the last batch is filled up
with rows that have no targets, so that every rank takes part in the same number of batches. The models have no dropout
and nothing else that knows training from evaluation, so there is no mode to switch. Blocks of experts count tokens in
backward alone, so the biases of their routers see nothing of this.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shardtrain import data, moving
from shardtrain.config import derived
from shardtrain.config.schema import Config, Validation
from shardtrain.errors import DataError
from shardtrain.log import logger
from shardtrain.parallel import BATCH_AXES, LOSS_AXES, Mesh, Runner, world
from shardtrain.parallel.shard import free_gathered
from shardtrain.stopping import Interrupted, Stop


@dataclass(frozen=True)
class Evaluation:
    """What one pass came to, equal on all ranks."""

    loss: float
    """Mean over the target tokens, in nats."""
    tokens: int
    """Target tokens."""
    rows: int
    """Sequences, without those that fill up the last batch."""

    @property
    def perplexity(self) -> float:
        """The exponential of the loss; infinite where a float cannot hold it."""
        return math.exp(self.loss) if self.loss < 709 else self.loss * math.inf  # nan stays nan


def evaluate(
    runner: Runner, stream: data.Stream, mesh: Mesh, max_batches: int = -1, stop: Stop | None = None
) -> Evaluation | None:
    """Read a stream that ends from its beginning, and measure the loss (a collective: every rank calls it).

    ``max_batches`` ends it early; -1 reads all. Weights, gradients and random numbers stay as they are. Gives None, on
    all ranks, where ``stop`` of one of them says that it was asked to stop.

    Raises:
        DataError: when the set has no target token.
    """
    stream.seek(0)
    loss = torch.zeros((), dtype=torch.float64, device=mesh.device)
    tokens = rows = 0
    try:
        for batch in _batches(stream, max_batches, mesh, stop or Stop()):
            tokens += batch.num_targets
            rows += int((batch.sample_ids_B >= 0).sum())
            loss += runner.evaluate(batch.to(mesh.device, non_blocking=True))
    except Interrupted:
        return None
    finally:
        for part in runner.parts:
            free_gathered(part)  # no backward follows that would; what reads parameters next must find own shards
        stream.seek(0)  # ends the processes that prepare batches
    counts = torch.tensor([tokens, rows], dtype=torch.float64, device=mesh.device)
    total_tokens, total_rows = mesh.sum(counts, over=BATCH_AXES).tolist()
    total = mesh.sum(loss, over=("pp", *LOSS_AXES)).item()
    if not total_tokens:
        raise DataError(f"validation: none of the {total_rows:.0f} sequences has a token to predict; use other data")
    return Evaluation(total / total_tokens, int(total_tokens), int(total_rows))


def _batches(stream: data.Stream, limit: int, mesh: Mesh, stop: Stop) -> Iterator[data.Batch]:
    """The batches of a stream that ends, or ``limit`` of them where it is not below 0; all ranks agree on each.

    Raises:
        Interrupted: on all ranks before the same batch, when one of them was asked to stop.
    """
    count = 0
    while count != limit:
        found = stop.read(lambda: (next(stream, None),))
        batch = found[0] if found else None
        if batch is None if found else stream.has_ended:
            return
        if mesh.sum_of_all(torch.tensor(0.0 if found else 1.0, device=mesh.device)).item():
            raise Interrupted
        assert batch is not None
        yield batch
        moving.tick()
        count += 1


class Validator:
    """Held-out data of a run, and when to evaluate on them; idle unless ``validation.enable``."""

    def __init__(self, config: Config, runner: Runner, mesh: Mesh, stop: Stop | None = None) -> None:
        self._options, self._runner, self._mesh, self._stop = config.validation, runner, mesh, stop
        self._stream = open_stream(config, mesh) if config.validation.enable else None
        self._last_step = 0

    def is_due(self, step: int, total_steps: int) -> bool:
        """Whether to evaluate after ``step`` (1 is the first): every ``validation.freq`` steps, and at the last.

        No step is due twice, so one may ask again where the data end before the last step.
        """
        due = step % self._options.freq == 0 or step == total_steps
        return self._stream is not None and due and step != self._last_step

    def run(self, step: int) -> Evaluation | None:
        """Evaluate after ``step`` on ``validation.steps`` batches, or on the whole set (a collective).

        None where the run was asked to stop before it was done.
        """
        assert self._stream is not None, "validation is off"
        self._last_step = step
        return evaluate(self._runner, self._stream, self._mesh, self._options.steps, self._stop)


def open_stream(config: Config, mesh: Mesh) -> data.Stream:
    """The validation set in its own order, once, dealt to the data-parallel ranks (a collective)."""
    stream = data.open_stream(
        config,
        section=section(config, mesh.device_mesh.size()),
        batch_rank=mesh.rank(*BATCH_AXES),
        num_batch_ranks=mesh.size(*BATCH_AXES),
        accumulation=1,
        shuffle=False,
        loop=False,
    )
    world.check_agreement(stream.fingerprint, "the validation data differ between ranks", mesh.device)
    v = config.validation
    logger.info(
        f"validation: {stream.num_samples} sequences of {v.seq_len} tokens, every {v.freq} steps and at the last"
    )
    return stream


def section(config: Config, world_size: int) -> Validation:
    """The validation options, with the rows per batch that the runner takes: a pipeline wants those of a whole step."""
    if config.parallelism.pipeline_parallel_degree == 1:
        return config.validation
    rows = config.training.local_batch_size * derived.accumulation_steps(config, world_size)
    return dataclasses.replace(config.validation, local_batch_size=rows)
