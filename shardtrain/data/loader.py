"""Data loader: this rank's rows of each step, determined by the number of samples that all ranks have
consumed.

Step s uses the positions [s G, (s + 1) G) of the sample order, where G is the global batch size. Rank r of
R uses the contiguous part [s G + r G / R, s G + (r + 1) G / R), divided into micro-batches. The row at a
position does not depend on ranks (see ``mix``, ``feed``), and so neither do the rows of a step. So a run
can resume on any other R.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from shardtrain.config.schema import DataLoaderOptions
from shardtrain.data.batch import Batch
from shardtrain.data.build_dataset import DataPipeline
from shardtrain.data.checksum import hash_rows
from shardtrain.data.digest import digest
from shardtrain.data.feed import CursorUpdate
from shardtrain.data.file_hashes import WholeFile
from shardtrain.data.packing.packed_rows import PackedSequences
from shardtrain.data.sources._data_files import sampled
from shardtrain.data.streaming.reader_cursors import ReaderCursors
from shardtrain.data.workers import death_of_worker, in_order
from shardtrain.ops import accelerator
from shardtrain.utils.errors import ShardtrainError

logger = logging.getLogger(__name__)

SOURCE_BITS = 48
"""A sample id is its number within its source, and above these bits the number of the source."""


@dataclass(frozen=True)
class RankSlice:
    """The rows of a step that belong to this rank: ``accumulation`` micro-batches of ``local_batch_size``
    rows."""

    local_batch_size: int
    batch_rank: int
    num_batch_ranks: int
    accumulation: int

    @property
    def global_batch(self) -> int:
        """Number of rows in one step, over all ranks (G)."""
        return self.local_batch_size * self.num_batch_ranks * self.accumulation

    def first_position(self, samples_consumed: int, micro_batch: int) -> int:
        """Return the position of the first row of this rank's micro-batch ``micro_batch`` after
        ``samples_consumed``."""
        step, within = divmod(micro_batch, self.accumulation)
        # a step consists of the micro-batches of all ranks, in the order of ranks
        micro_batches_before = self.batch_rank * self.accumulation + within
        return (
            samples_consumed
            + step * self.global_batch
            + micro_batches_before * self.local_batch_size
        )


def sources_of_rows(batches: Sequence[Batch]) -> list[int]:
    """Return the number of the source of each row of some batches; 0 for padding rows, which have no targets."""
    sources = []
    for batch in batches:
        for sample in batch.sample_ids_B.tolist():
            sources.append(max(0, sample >> SOURCE_BITS))
    return sources


BatchWithCursors = tuple[Batch, list[tuple[int, CursorUpdate]]]
"""A batch, and for each virtual reader that advanced, its source and its cursor after the batch."""


class MicroBatches(torch.utils.data.Dataset[BatchWithCursors | ShardtrainError]):
    """A rank's micro-batches by number, from a position on. Each worker reads ascending numbers."""

    def __init__(self, opened: DataPipeline, share: RankSlice, samples_consumed: int) -> None:
        self._opened = opened
        self._share = share
        self._start = samples_consumed

    def __getitem__(self, micro_batch: int) -> BatchWithCursors | ShardtrainError:
        """Return a micro-batch, or an error.

        An error raised in a worker would reach the rank as a traceback text.
        """
        try:
            return self.make(self._share.first_position(self._start, micro_batch))
        except ShardtrainError as error:
            return error

    def make(self, position: int) -> BatchWithCursors:
        """Return the micro-batch that begins at ``position``, and the cursors that have moved."""
        count = self._share.local_batch_size
        pipeline = self._opened

        # Rows that are not written stay filler: past the end of the data every rank still gets batches,
        # since the step is a collective.
        rows = PackedSequences(count, pipeline.packing)
        sample_ids = np.full(count, -1, dtype=np.int64)
        cursors: dict[tuple[int, int], CursorUpdate] = {}
        sources, numbers = pipeline.mixture.locate(
            np.arange(position, position + count, dtype=np.int64)
        )
        for slot in range(count):
            if pipeline.end is not None and position + slot >= pipeline.end:
                break
            source = int(sources[slot])
            sample, cursor = pipeline.feeds[source].write(int(numbers[slot]), rows, slot)
            if sample >= 0:
                sample_ids[slot] = sample + (source << SOURCE_BITS)
            if cursor is not None:
                # The last one wins: where the reader is after the batch.
                cursors[source, cursor.reader] = cursor

        documents_BT = None if rows.documents_BT is None else torch.from_numpy(rows.documents_BT)
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
    """Iterator over this rank's micro-batches, ``accumulation`` of them per step; see ``open_dataloader``.

    Attributes:
        tokenizer: the tokenizer of the dataset.
        vocab: vocabulary size; token ids are in 0..vocab-1.
        files: maps each file to a fingerprint of its content, to name the one that differs.
        num_samples: number of rows in one epoch, over all ranks; None for mixtures, and if not known before
            reading.
        num_documents: number of rows of the dataset with a target; None like num_samples.
        places_per_epoch: increase of samples_consumed per epoch: num_samples, or complete steps if epochs
            end at the border of a step (training.last_batch).
        end: samples after which the data end; None if they repeat, or if not known before reading.
        pad_id: token at positions without a document; never a target.
        masks_documents: True if batches contain the document of each token.
        accumulation: number of micro-batches in a step.
        global_batch: number of rows in one step, over all ranks (G).
        num_readers: number of virtual readers of datasets that are tokenized during training, else 0.
        ends_without_notice: True if the end of the data is not known before reading; readers at their end
            return padding rows.
        fingerprint: SHA-256 in hex of datasets, tokenizer, sequence length, seed and order. A run resumes
            only with the same one.
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
        self.num_samples = opened.feeds[0].num_rows if len(opened.feeds) == 1 else None
        self.num_documents = opened.feeds[0].num_documents if len(opened.feeds) == 1 else None
        self.places_per_epoch: int | None = self.num_samples
        self.end = opened.end
        self.global_batch = share.global_batch
        self.accumulation = share.accumulation
        self.pad_id = opened.packing.pad_id
        self.masks_documents = opened.packing.needs_documents
        self.num_readers = sum(feed.num_readers for feed in opened.feeds)
        self.ends_without_notice = any(feed.ends_without_notice for feed in opened.feeds)
        self.fingerprint = digest(
            [feed.fingerprint for feed in opened.feeds], opened.mixture.fingerprint
        )
        self.files: Mapping[str, str] = opened.feeds[0].files
        if len(opened.feeds) > 1:
            # two sources may have files with the same name
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
        # Created with the first batch: workers prefetch from the start, and a resume seeks elsewhere before
        # that.
        self._batches: Iterator[BatchWithCursors | ShardtrainError] | None = None
        self.seek(samples_consumed)

    def padding_by_source(self) -> dict[str, float]:
        """Return the fraction of padding in the rows of each source: tokens that are no input of a document.

        Omits sources whose rows are not known before reading.
        """
        fractions = {}
        for name, feed in zip(self._opened.names, self._opened.feeds, strict=True):
            if feed.num_rows is not None:
                fractions[name] = 1 - feed.mean_targets / self._opened.packing.seq_len
        return fractions

    @cached_property
    def sampled_files(self) -> dict[str, str]:
        """At most 4,096 of ``files``, evenly spread, for checkpoints; more would take more than half a
        megabyte.

        The fingerprint covers all files. These are only used to name one that differs.
        """
        return sampled(self.files)

    @cached_property
    def whole_files(self) -> list[WholeFile]:
        """The files of all sources, to hash completely. Only rank 0 uses them."""
        several = len(self._opened.feeds) > 1
        files = []
        for source, feed in zip(self._opened.names, self._opened.feeds, strict=True):
            for file in feed.whole_files():
                if several:
                    file = replace(file, name=f"{source}: {file.name}")
                files.append(file)
        return files

    @property
    def samples_consumed(self) -> int:
        """Number of samples in all steps that were returned completely, over all ranks; at most the end of
        the data."""
        position = (
            self._start + self._batches_returned // self._share.accumulation * self.global_batch
        )
        return position if self.end is None else min(position, self.end)

    @property
    def steps_left(self) -> int | None:
        """Number of steps to the end of the data, the last one possibly smaller.

        None if they repeat or the end is unknown.
        """
        if self.end is None:
            return None
        samples_left = self.end - self.samples_consumed
        return -(-samples_left // self.global_batch)

    def seek(self, samples_consumed: int, cursors: npt.NDArray[np.int64] | None = None) -> None:
        """Seek to the position at which all ranks together have consumed this many samples.

        ``cursors`` is the result of ``cursors()`` at that position, merged over all ranks. Without them, a
        streamed dataset is read again up to this position. Other datasets seek immediately. Worker
        processes end, and new ones start with the next batch.
        """
        self._batches = None
        self._start = samples_consumed
        self._batches_returned = 0
        self.step_hash = 0
        rows_before = self._opened.mixture.rows_before(samples_consumed).tolist()
        # The array has the cursors of all feeds one after the other, as ``cursors()`` concatenates them.
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
        return dict(
            zip(
                opened.names,
                opened.mixture.rows_before(self.samples_consumed).tolist(),
                strict=True,
            )
        )

    def cursors(self, samples_consumed: int | None = None) -> npt.NDArray[np.int64]:
        """Return the cursors of all virtual readers, (readers, 3), -1 for those that only another rank
        knows.

        They are the cursors after the last complete step, or after ``samples_consumed``, which may be that
        step or the one before.
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
        """Return the next micro-batch. Raises StopIteration at the start of a step if the data are known to
        have ended.

        Raises:
            DataError: a row of a dataset that is tokenized during training is bad.
            ConfigError: a file was changed during the run.
        """
        # At the start of a step. The data may end only here, so all ranks stop before the same step.
        if self._batches_returned % self._share.accumulation == 0:
            if self.has_ended:
                raise StopIteration
            if self.num_readers:
                for cursors in self._reader_cursors:
                    cursors.mark()
            self.step_hash = 0
            after = self._opened.mixture.rows_before(self.samples_consumed + self.global_batch)
            for source, epoch in enumerate(self._epochs_after(after.tolist())):
                self._note_epoch(source, epoch)

        # Hashed here, not in the worker that prefetched it: the order hash covers what the trainer was given.
        batch, moved = self._next_batch()
        self.step_hash += self.hash_rows(
            batch, self._share.first_position(self._start, self._batches_returned)
        )
        for source, cursor in moved:
            self._reader_cursors[source].move(cursor)
            self._note_epoch(source, cursor.epoch)
        self._batches_returned += 1
        return batch.pin_memory() if self._pin_memory else batch

    def _next_batch(self) -> BatchWithCursors:
        """Return the next batch from this process or its workers. Raises the error of a worker."""
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
        # An error of a worker arrives as a value: see ``MicroBatches``.
        if isinstance(batch, ShardtrainError):
            raise batch
        return batch

    def _epochs_after(self, rows: list[int]) -> list[int]:
        """Return the epoch, from 0, of each source after some of its rows."""
        return [
            feed.epoch_after(count) for feed, count in zip(self._opened.feeds, rows, strict=True)
        ]

    def _note_epoch(self, source: int, epoch: int) -> None:
        """Log that a source begins epoch 2, 4, 8, ..., unless the run has a fixed number of epochs."""
        if epoch <= self._epochs[source]:
            return
        # Several epochs may have begun since the last row of this rank.
        is_next_power = (epoch + 1).bit_length() > (self._epochs[source] + 1).bit_length()
        self._epochs[source] = epoch
        if is_next_power and self._opened.feeds[source].passes is None:
            logger.warning(
                "dataset %s is being re-looped (epoch %d)", self._opened.names[source], epoch + 1
            )
