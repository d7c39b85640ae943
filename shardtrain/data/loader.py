"""Data loader: reads this rank's rows of each step.

Its position is the number of samples that all ranks together have consumed. Step s uses the positions [s G,
(s + 1) G) of the sample order, where G is the global batch size. Rank r of R uses the contiguous part [s G
+ r G / R, s G + (r + 1) G / R), divided into micro-batches. With a batch ramp, G is a function of the
position at which a step starts. Which row is at a position does not depend on the number of ranks (see
``mix``, ``feed``). So all rows of a step are the same on any number of ranks, and a run can resume with a
different R.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from shardtrain.config.ramps import StepSizes
from shardtrain.config.schema import DataLoaderOptions
from shardtrain.data.batch import Batch
from shardtrain.data.build_dataset import DataPipeline
from shardtrain.data.checksum import hash_rows
from shardtrain.data.digest import digest
from shardtrain.data.feed import CursorUpdate
from shardtrain.data.file_hashes import FileToHash
from shardtrain.data.packing.packed_rows import PackedSequences
from shardtrain.data.sources._data_files import sampled
from shardtrain.data.streaming.reader_cursors import ReaderCursors
from shardtrain.data.workers import death_of_worker, in_order
from shardtrain.ops import accelerator
from shardtrain.utils.errors import ShardtrainError

logger = logging.getLogger(__name__)

SOURCE_BITS = 48
"""A sample id has the sample's number within its source in its low bits, and the source's number above them."""


@dataclass(frozen=True)
class RankSlice:
    """The rows of a step that belong to this rank: ``accumulation`` micro-batches of ``local_batch_size`` rows.

    With ``sizes``, the number of micro-batches grows during a run, and ``accumulation`` is the last one.
    """

    local_batch_size: int
    batch_rank: int
    num_batch_ranks: int
    accumulation: int
    sizes: StepSizes | None = None

    @property
    def rows_per_pass(self) -> int:
        """Number of rows of one micro-batch of each rank."""
        return self.local_batch_size * self.num_batch_ranks

    @property
    def global_batch(self) -> int:
        """Number of rows in one step, over all ranks (G). With ``sizes``, that of the last steps."""
        return self.rows_per_pass * self.accumulation

    @cached_property
    def step_sizes(self) -> StepSizes:
        """Number of rows of each step, over all ranks."""
        return self.sizes or StepSizes(((0, self.global_batch),))

    def first_position(self, samples_consumed: int, micro_batch: int) -> int:
        """Return the position of the first row in a micro-batch of this rank.

        ``micro_batch`` counts this rank's micro-batches after the position ``samples_consumed``.
        """
        # All ranks together read the rows of this many passes before the micro-batch. Find the step to which the
        # first of these rows belongs.
        first_row = samples_consumed + micro_batch * self.rows_per_pass
        step = self.step_sizes.step_of(samples_consumed, first_row)
        step_start = self.step_sizes.after(samples_consumed, step)
        accumulation = self.step_sizes.batch_at(step_start) // self.rows_per_pass
        within = (first_row - step_start) // self.rows_per_pass
        # A step consists of all micro-batches of rank 0, then all micro-batches of rank 1, and so on.
        micro_batches_before = self.batch_rank * accumulation + within
        return step_start + micro_batches_before * self.local_batch_size


def sources_of_rows(batches: Sequence[Batch]) -> list[int]:
    """Return for each row the number of its source. 0 for padding rows, which have no targets."""
    sources = []
    for batch in batches:
        for sample in batch.sample_ids_B.tolist():
            sources.append(max(0, sample >> SOURCE_BITS))
    return sources


BatchWithCursors = tuple[Batch, list[tuple[int, CursorUpdate]]]
"""A batch, and for each virtual reader that has advanced, its source and its position after the batch."""


class MicroBatches(torch.utils.data.Dataset[BatchWithCursors | ShardtrainError]):
    """A rank's micro-batches, numbered from a start position. Each worker reads them in ascending order."""

    def __init__(self, opened: DataPipeline, share: RankSlice, samples_consumed: int) -> None:
        self._opened = opened
        self._share = share
        self._start = samples_consumed

    def __getitem__(self, micro_batch: int) -> BatchWithCursors | ShardtrainError:
        """Return a micro-batch, or an error as a value.

        If a worker raised the error, PyTorch would pass it to the rank as the text of a traceback.
        """
        try:
            return self.make(self._share.first_position(self._start, micro_batch))
        except ShardtrainError as error:
            return error

    def make(self, position: int) -> BatchWithCursors:
        """Return the micro-batch that begins at ``position``, and the new positions of virtual readers."""
        count = self._share.local_batch_size
        pipeline = self._opened

        # Rows that are not written below stay padding. A rank needs batches even after the end of its data,
        # because all ranks must take part in the step.
        rows = PackedSequences(count, pipeline.packing)
        sample_ids = np.full(count, -1, dtype=np.int64)
        cursors: dict[tuple[int, int], CursorUpdate] = {}
        positions = np.arange(position, position + count, dtype=np.int64)
        sources, numbers = pipeline.mixture.locate(positions)
        for slot in range(count):
            if pipeline.end is not None and position + slot >= pipeline.end:
                break
            source = int(sources[slot])
            sample, cursor = pipeline.feeds[source].write(int(numbers[slot]), rows, slot)
            if sample >= 0:
                sample_ids[slot] = sample + (source << SOURCE_BITS)
            if cursor is not None:
                # Keep only the last position of each reader in the batch.
                cursors[source, cursor.reader] = cursor

        documents_BT = None
        if rows.documents_BT is not None:
            documents_BT = torch.from_numpy(rows.documents_BT)
        batch = Batch(
            tokens_BT=torch.from_numpy(rows.tokens_BT),
            targets_BT=torch.from_numpy(rows.targets_BT),
            positions_BT=torch.from_numpy(rows.positions_BT),
            sample_ids_B=torch.from_numpy(sample_ids),
            documents_BT=documents_BT,
            lengths_B=torch.from_numpy(rows.lengths_B),
        )
        return batch, [(source, cursor) for (source, _), cursor in cursors.items()]


class DataLoader:
    """Iterator over this rank's micro-batches, ``accumulation`` of them per step, see ``open_dataloader``.

    A step is complete when its last micro-batch is returned. The next step is then the current one.

    Attributes:
        tokenizer: the tokenizer of the dataset.
        vocab: vocabulary size. Token ids are in 0..vocab-1.
        files: maps each file to a fingerprint of its content. Used to name the file that has changed.
        num_samples: number of rows in one epoch, over all ranks. None for mixtures, and if it is unknown
            until the data are read.
        num_documents: number of documents with a target in the dataset. None in the same cases as
            num_samples.
        places_per_epoch: how much samples_consumed increases in an epoch. This is num_samples, or a
            multiple of the global batch size if epochs end with a complete step (training.last_batch).
        end: number of samples after which the data end. None if they repeat, or if it is unknown until the
            data are read.
        pad_id: token at positions without a document. It is never a target.
        masks_documents: True if batches contain the document of each token.
        num_readers: number of virtual readers of datasets that are tokenized during training, else 0.
        has_unknown_end: True if the end of the data is unknown until they are read. Readers that have
            finished return padding rows.
        fingerprint: SHA-256 in hex of datasets, tokenizer, sequence length, seed and order. A run can resume
            only if it is unchanged.
        step_hash: contribution of this rank's current step to the run's order hash (see ``checksum``).
    """

    hash_rows = staticmethod(hash_rows)

    @property
    def sequence_lengths(self) -> Mapping[int, int]:
        """Number of sequences of each length. Empty if all have the length ``seq_len``."""
        return {}

    def __init__(
        self,
        opened: DataPipeline,
        share: RankSlice,
        options: DataLoaderOptions,
        samples_consumed: int,
    ) -> None:
        self.tokenizer = opened.tokenizer
        self.vocab = opened.tokenizer.vocab_size
        # A mixture has no number of samples, because its sources repeat at different rates.
        self.num_samples: int | None = None
        self.num_documents: int | None = None
        if len(opened.feeds) == 1:
            self.num_samples = opened.feeds[0].num_rows
            self.num_documents = opened.feeds[0].num_documents
        self.places_per_epoch = self.num_samples
        self.end = opened.end
        self.pad_id = opened.packing.pad_id
        self.masks_documents = opened.packing.needs_documents
        self.num_readers = sum(feed.num_readers for feed in opened.feeds)
        self.has_unknown_end = any(feed.has_unknown_end for feed in opened.feeds)
        fingerprints = [feed.fingerprint for feed in opened.feeds]
        self.fingerprint = digest(fingerprints, opened.mixture.fingerprint)
        self.files: Mapping[str, str] = opened.feeds[0].files
        if len(opened.feeds) > 1:
            # Add the source's name, because two sources may have files with the same name.
            files = {}
            for source, feed in zip(opened.names, opened.feeds, strict=True):
                for name, mark in feed.files.items():
                    files[f"{source}: {name}"] = mark
            self.files = files
        self._opened = opened
        self._share = share
        self._options = options
        self._pin_memory = options.pin_memory and accelerator.pins_memory()
        self._reader_cursors = [ReaderCursors(feed.num_readers) for feed in opened.feeds]
        # Workers are started only with the first batch. They prefetch from the current position, and a
        # resumed run first seeks to another one.
        self._batches: Iterator[BatchWithCursors | ShardtrainError] | None = None
        self.seek(samples_consumed)

    def padding_by_source(self) -> dict[str, float]:
        """Return for each source the fraction of padding in its rows.

        Omits sources whose number of rows is unknown until they are read.
        """
        fractions = {}
        for name, feed in zip(self._opened.names, self._opened.feeds, strict=True):
            if feed.num_rows is not None:
                fractions[name] = 1 - feed.mean_targets / self._opened.packing.seq_len
        return fractions

    @cached_property
    def sampled_files(self) -> dict[str, str]:
        """At most 4,096 of ``files``, evenly spread, for checkpoints.
        More files would need over half a megabyte.

        They are only used to name a file that has changed.
        The fingerprint detects changes, and covers all files.
        """
        return sampled(self.files)

    @cached_property
    def files_to_hash(self) -> list[FileToHash]:
        """The files of all sources that should be hashed completely. Only rank 0 uses this."""
        several = len(self._opened.feeds) > 1
        files = []
        for source, feed in zip(self._opened.names, self._opened.feeds, strict=True):
            for file in feed.files_to_hash():
                if several:
                    file = replace(file, name=f"{source}: {file.name}")
                files.append(file)
        return files

    @property
    def samples_consumed(self) -> int:
        """Number of samples of all ranks in the steps that were returned completely.

        It does not exceed the end of the data.
        """
        return self._step_start if self.end is None else min(self._step_start, self.end)

    @property
    def global_batch(self) -> int:
        """Number of rows of the current step, over all ranks (G)."""
        return self.step_sizes.batch_at(self._step_start)

    @property
    def accumulation(self) -> int:
        """Number of micro-batches of the current step."""
        return self.global_batch // self._share.rows_per_pass

    @property
    def tokens_per_sequence(self) -> int | None:
        """Number of tokens per sequence of the current step. None without a sequence ramp."""
        return self.step_sizes.length_at(self._step_start)

    @property
    def step_sizes(self) -> StepSizes:
        """Number of rows of each step, over all ranks."""
        return self._share.step_sizes

    @property
    def steps_left(self) -> int | None:
        """Number of steps until the data end. The last step may be smaller.

        None if the data repeat, or if their end is unknown.
        """
        if self.end is None:
            return None
        return self.step_sizes.num_steps(self.samples_consumed, self.end)

    def seek(self, samples_consumed: int, cursors: npt.NDArray[np.int64] | None = None) -> None:
        """Seek to the position at which all ranks together have consumed this many samples.

        This ends the worker processes. New ones are started with the next batch.

        Args:
            samples_consumed: the position.
            cursors: result of ``cursors()`` at this position, merged over all ranks. Without it, a streamed
                dataset must be read again up to this position. Other datasets seek immediately.
        """
        self._batches = None
        self._start = samples_consumed
        self._batches_returned = 0
        # The position at which the current step starts, and how many of its micro-batches were returned.
        self._step_start = samples_consumed
        self._batches_of_step = 0
        self.step_hash = 0
        rows_before = self._opened.mixture.rows_before(samples_consumed).tolist()
        # ``cursors`` contains the cursors of the first feed, then those of the second feed, and so on.
        first = 0
        for feed, reader_cursors, rows in zip(
            self._opened.feeds, self._reader_cursors, rows_before, strict=True
        ):
            cursors_of_feed = None if cursors is None else cursors[first : first + feed.num_readers]
            feed.seek(rows, cursors_of_feed)
            reader_cursors.begin(rows, cursors_of_feed)
            first += feed.num_readers
        self._epochs = self._epochs_after(rows_before)

    @property
    def has_ended(self) -> bool:
        """True if the data are known to have ended before the current step."""
        return self.end is not None and self.samples_consumed >= self.end

    @property
    def rows_of_sources(self) -> dict[str, int]:
        """Number of rows of each source consumed so far. Empty with a single source."""
        opened = self._opened
        if len(opened.names) < 2:
            return {}
        counts = opened.mixture.rows_before(self.samples_consumed).tolist()
        return dict(zip(opened.names, counts, strict=True))

    def cursors(self, samples_consumed: int | None = None) -> npt.NDArray[np.int64]:
        """Return the cursors of all virtual readers, (readers, 3). -1 if only another rank knows a cursor.

        They are the cursors after the last complete step, or at the position ``samples_consumed``. This may
        be the end of the last complete step, or of the step before it.
        """
        if samples_consumed is None:
            samples_consumed = self.samples_consumed
        rows_before = self._opened.mixture.rows_before(samples_consumed).tolist()
        of_sources = [
            cursors.at(rows)
            for cursors, rows in zip(self._reader_cursors, rows_before, strict=True)
        ]
        return np.concatenate(of_sources)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Return the next micro-batch.

        Raises:
            StopIteration: a step would start, but the data are known to have ended.
            DataError: a row of a dataset that is tokenized during training is bad.
            ConfigError: a file was changed during the run.
        """
        # A step starts. Check for the end of the data only here. Then all ranks stop before the same step.
        if self._batches_of_step == 0:
            if self.has_ended:
                raise StopIteration
            if self.num_readers:
                for cursors in self._reader_cursors:
                    cursors.mark()
            self.step_hash = 0
            after = self._opened.mixture.rows_before(self.samples_consumed + self.global_batch)
            for source, epoch in enumerate(self._epochs_after(after.tolist())):
                self._note_epoch(source, epoch)

        # Compute the hash here and not in the worker that has prefetched the batch, because the order hash
        # must cover exactly what the trainer receives.
        batch, moved = self._next_batch()
        self.step_hash += self.hash_rows(
            batch, self._share.first_position(self._start, self._batches_returned)
        )
        for source, cursor in moved:
            self._reader_cursors[source].move(cursor)
            self._note_epoch(source, cursor.epoch)
        self._batches_returned += 1
        length = self.tokens_per_sequence
        if length is not None:
            batch = batch.divided(length)
        self._batches_of_step += 1
        if self._batches_of_step == self.accumulation:
            self._step_start += self.global_batch
            self._batches_of_step = 0
        return batch.pin_memory() if self._pin_memory else batch

    def _next_batch(self) -> BatchWithCursors:
        """Return the next batch, made by this process or by a worker. Raise the error of a worker."""
        if self._batches is None:
            self._batches = in_order(
                MicroBatches(self._opened, self._share, self._start), self._options
            )
        try:
            batch = next(self._batches)
        except RuntimeError as error:
            death = death_of_worker(error)
            if death is None:
                raise
            raise death from error
        # A worker returns an error as a value, see ``MicroBatches``.
        if isinstance(batch, ShardtrainError):
            raise batch
        return batch

    def _epochs_after(self, rows: list[int]) -> list[int]:
        """Return the epoch (from 0) that each source is in, given how many of its rows were read."""
        return [
            feed.epoch_after(count) for feed, count in zip(self._opened.feeds, rows, strict=True)
        ]

    def _note_epoch(self, source: int, epoch: int) -> None:
        """Log when a source begins epoch 2, 4, 8, ..., unless the run has a fixed number of epochs."""
        if epoch <= self._epochs[source]:
            return
        # Several epochs may have begun since this rank's last row, so an exact power of two may be skipped.
        is_next_power = (epoch + 1).bit_length() > (self._epochs[source] + 1).bit_length()
        self._epochs[source] = epoch
        if is_next_power and self._opened.feeds[source].passes is None:
            logger.warning(
                "dataset %s is being re-looped (epoch %d)", self._opened.names[source], epoch + 1
            )
