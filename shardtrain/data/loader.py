"""This rank's rows of each step, from one number: how many samples all ranks have consumed.

Step s takes positions [s G, (s + 1) G) of the sample order, G being the global batch size. Rank r of R takes the
contiguous share [s G + r G / R, s G + (r + 1) G / R) and cuts it into micro-batches. Positions become samples before
ranks exist (see ``order``), so the batches of a step do not depend on R, and a run continues on any other R.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from shardtrain.config.schema import Config, DataLoader, Training, Validation
from shardtrain.data import sources
from shardtrain.data.batch import IGNORE, Batch
from shardtrain.data.order import sample_at
from shardtrain.data.pack import Packed, concatenate
from shardtrain.data.tokenizer import Tokenizer, open_tokenizer
from shardtrain.errors import ConfigError, DataError, Problem

logger = logging.getLogger(__name__)


class Stream:
    """Endless iterator over this rank's micro-batches, ``accumulation`` of them per step; see ``open_stream``.

    tokenizer:       the tokenizer of the dataset.
    vocab:           token ids are in 0..vocab-1.
    num_samples:     rows of one epoch, over all ranks.
    global_batch:    rows of one step, over all ranks (G).
    fingerprint:     SHA-256 in hex of dataset, tokenizer, sequence length, seed and order. A run may be continued
                     only where it is the same.
    """

    def __init__(
        self,
        name: str,
        packed: Packed,
        tokenizer: Tokenizer,
        *,
        local_batch_size: int,
        batch_rank: int,
        num_batch_ranks: int,
        accumulation: int,
        samples_consumed: int,
        seed: int,
        shuffle: bool,
        loop: bool,
        pin_memory: bool,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab = tokenizer.vocab_size
        self.num_samples = packed.num_samples
        self.global_batch = local_batch_size * num_batch_ranks * accumulation
        self.fingerprint = _fingerprint(packed, tokenizer, seed if shuffle else None)
        self._name, self._packed = name, packed
        self._local_batch_size, self._accumulation = local_batch_size, accumulation
        self._share_start = batch_rank * local_batch_size * accumulation
        self._seed, self._shuffle, self._loop, self._pin_memory = seed, shuffle, loop, pin_memory
        self.seek(samples_consumed)

    @property
    def samples_consumed(self) -> int:
        """Samples of all steps that were handed out in full, over all ranks; the only state of a stream."""
        return self._step_start

    def seek(self, samples_consumed: int) -> None:
        """Stand where all ranks together have consumed this many samples, at once."""
        self._step_start, self._micro_batch = samples_consumed, 0
        self._epoch = samples_consumed // self.num_samples

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next micro-batch, or StopIteration at the end of the epoch when the stream does not loop."""
        if self._micro_batch == 0:
            if not self._loop and self._step_start >= self.num_samples:
                raise StopIteration
            self._say_new_epoch()
        start = self._step_start + self._share_start + self._micro_batch * self._local_batch_size
        batch = self._batch(np.arange(start, start + self._local_batch_size, dtype=np.int64))
        self._micro_batch += 1
        if self._micro_batch == self._accumulation:
            self._step_start, self._micro_batch = self._step_start + self.global_batch, 0
        return batch.pin_memory() if self._pin_memory else batch

    def _batch(self, positions: npt.NDArray[np.int64]) -> Batch:
        # a stream that ends may not fill its last step: filler rows keep every rank at the same number of batches
        filler = np.zeros(len(positions), dtype=bool) if self._loop else positions >= self.num_samples
        positions = np.where(filler, 0, positions)
        samples = sample_at(positions, self.num_samples, self._seed) if self._shuffle else positions % self.num_samples
        rows = self._packed.rows(samples)
        targets = np.where(filler[:, None], IGNORE, rows[:, 1:])
        return Batch(
            tokens_BT=torch.from_numpy(np.ascontiguousarray(rows[:, :-1])),
            targets_BT=torch.from_numpy(targets),
            positions_BT=torch.arange(self._packed.seq_len).repeat(len(rows), 1),
            sample_ids_B=torch.from_numpy(np.where(filler, -1, samples)),
        )

    def _say_new_epoch(self) -> None:
        epoch = (self._step_start + self.global_batch - 1) // self.num_samples
        if self._loop and epoch > self._epoch:
            logger.warning("dataset %s is being re-looped (epoch %d)", self._name, epoch + 1)
        self._epoch = max(self._epoch, epoch)


def open_stream(
    config: Config,
    *,
    batch_rank: int,
    num_batch_ranks: int,
    accumulation: int,
    samples_consumed: int = 0,
    section: Training | Validation | None = None,
    shuffle: bool = True,
    loop: bool = True,
) -> Stream:
    """Read and tokenise a dataset, and stand at any point of its order at once.

    Ranks that share a batch (tensor, context and pipeline peers) pass the same ``batch_rank``, 0..num_batch_ranks-1.
    ``accumulation`` is the number of micro-batches per step. ``samples_consumed`` counts samples over all ranks since
    the start of the run. ``section`` is config.training unless config.validation is passed. Without ``shuffle`` rows
    come in the order of the dataset; without ``loop`` the stream ends after one epoch, on all ranks at the same step,
    the last of which is filled up with rows that have no targets and sample id -1.

    Raises:
        ConfigError: when the dataset or tokenizer is unknown or cannot be opened.
        DataError: when the data cannot be read or is too short for one row.
    """
    section = section or config.training
    word = "validation" if isinstance(section, Validation) else "training"
    if not 0 <= batch_rank < num_batch_ranks:
        raise ValueError(f"batch_rank={batch_rank} is not in 0..{num_batch_ranks - 1}")
    if accumulation < 1 or samples_consumed < 0:
        raise ValueError(f"accumulation={accumulation} must be at least 1, samples_consumed={samples_consumed} 0")
    for key in ("local_batch_size", "seq_len"):
        if getattr(section, key) < 1:
            raise ConfigError(Problem(f"{word}.{key}", getattr(section, key), "must be at least 1", "use 1 or more"))
    source = sources.find(section.dataset, option=f"{word}.dataset")
    tokenizer = _tokenizer(config)
    documents = source.documents(section.dataset_path, f"{word}.dataset_path")
    packed = Packed(concatenate(documents, tokenizer), section.seq_len, f"{word}.seq_len")
    return Stream(
        section.dataset,
        packed,
        tokenizer,
        local_batch_size=section.local_batch_size,
        batch_rank=batch_rank,
        num_batch_ranks=num_batch_ranks,
        accumulation=accumulation,
        samples_consumed=samples_consumed,
        seed=config.debug.seed,
        shuffle=shuffle,
        loop=loop,
        pin_memory=_pins(section.dataloader, word),
    )


def steps_for_epochs(num_samples: int, epochs: int, global_batch: int) -> int:
    """Whole optimizer steps in a number of passes over the data; what is left over is not trained on.

    Raises:
        DataError: when the passes do not fill one step.

    >>> steps_for_epochs(num_samples=132 * 8, epochs=3, global_batch=8)
    396
    """
    steps = num_samples * epochs // global_batch
    if steps < 1:
        rule = f"gives {num_samples * epochs} samples, less than one step of {global_batch} sequences"
        fix = "use more epochs, more data, or a smaller training.global_batch_size"
        raise DataError(str(Problem("training.epochs", epochs, rule, fix)))
    return steps


def _tokenizer(config: Config) -> Tokenizer:
    if config.model.tokenizer_path is not None:
        return open_tokenizer(config.model.tokenizer_path, option="model.tokenizer_path")
    return open_tokenizer(config.model.hf_assets_path)


def _pins(options: DataLoader, word: str) -> bool:
    """Whether to pin batches; what the options cannot do here is said aloud."""
    if options.num_workers or options.persistent_workers or options.prefetch_factor is not None:
        logger.warning(
            "%s.dataloader: num_workers, persistent_workers and prefetch_factor start no processes; the tokens are in "
            "memory and a batch takes about a millisecond",
            word,
        )
    if options.pin_memory and not torch.cuda.is_available():
        logger.warning("%s.dataloader.pin_memory=true has no effect without a CUDA device", word)
    return options.pin_memory and torch.cuda.is_available()


def _fingerprint(packed: Packed, tokenizer: Tokenizer, seed: int | None) -> str:
    facts = f"{tokenizer.fingerprint} {packed.tokens.dtype.str} {packed.seq_len} {seed}"
    return hashlib.sha256(facts.encode() + hashlib.sha256(packed.tokens.data).digest()).hexdigest()
