"""This rank's rows of each step, from one number: how many samples all ranks have consumed.

Step s takes positions [s G, (s + 1) G) of the sample order, G being the global batch size. Rank r of R takes the
contiguous share [s G + r G / R, s G + (r + 1) G / R) and cuts it into micro-batches. Positions become rows before ranks
exist (see ``mix``, ``feed``), so the batches of a step do not depend on R, and a run continues on any other R.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
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
from shardtrain.data.packing import Sequences
from shardtrain.data.reader_cursors import ReaderCursors
from shardtrain.data.sources._files import sampled
from shardtrain.data.workers import death_of_worker, in_order
from shardtrain.ops import accelerator
from shardtrain.utils.errors import ShardtrainError

logger = logging.getLogger(__name__)

SOURCE_BITS = 48
"""A sample id is its number within its source, and above these bits the number of the source."""


@dataclass(frozen=True)
class RankSlice:
    """Which rows are this rank's: micro-batches of B rows, ``accumulation`` of them per step, of one rank of R."""

    local_batch_size: int
    batch_rank: int
    num_batch_ranks: int
    accumulation: int

    @property
    def global_batch(self) -> int:
        """Rows of one step, over all ranks (G)."""
        return self.local_batch_size * self.num_batch_ranks * self.accumulation

    def first_position(self, samples_consumed: int, micro_batch: int) -> int:
        """Position of the first row of this rank's micro-batch number ``micro_batch`` after some samples."""
        step, within = divmod(micro_batch, self.accumulation)
        start = self.batch_rank * self.accumulation + within
        return samples_consumed + step * self.global_batch + start * self.local_batch_size


BatchWithCursors = tuple[Batch, list[tuple[int, CursorUpdate]]]
"""A batch, and for each reader of each source that moved, its cursor afterwards."""


class MicroBatches(torch.utils.data.Dataset[BatchWithCursors | ShardtrainError]):
    """A rank's micro-batches by number, from a point of the order on; asked for ascending numbers by each worker."""

    def __init__(self, opened: DataPipeline, share: RankSlice, samples_consumed: int) -> None:
        self._opened = opened
        self._share = share
        self._start = samples_consumed

    def __getitem__(self, micro_batch: int) -> BatchWithCursors | ShardtrainError:
        """A micro-batch; an error comes back as a value, so that it crosses from a worker in one line."""
        try:
            return self.make(self._share.first_position(self._start, micro_batch))
        except ShardtrainError as error:
            return error

    def make(self, position: int) -> BatchWithCursors:
        """The rows at ``position`` and after."""
        count = self._share.local_batch_size
        opened = self._opened
        rows = Sequences(count, opened.packing)
        # a row that nothing is written to is filler: after the end of the data every rank still has its batches, since
        # the step is a collective
        sample_ids = np.full(count, -1, dtype=np.int64)
        moved: dict[tuple[int, int], CursorUpdate] = {}
        sources, numbers = opened.mixture.locate(np.arange(position, position + count, dtype=np.int64))
        for slot in range(count):
            if opened.end is not None and position + slot >= opened.end:
                break
            source = int(sources[slot])
            sample, move = opened.feeds[source].write(int(numbers[slot]), rows, slot)
            if sample >= 0:
                sample_ids[slot] = sample + (source << SOURCE_BITS)
            if move is not None:
                moved[source, move.reader] = move  # the last row of a reader says where it is after the batch
        batch = Batch(
            tokens_BT=torch.from_numpy(rows.tokens_BT),
            targets_BT=torch.from_numpy(rows.targets_BT),
            positions_BT=torch.from_numpy(rows.positions_BT),
            sample_ids_B=torch.from_numpy(sample_ids),
            documents_BT=None if rows.documents_BT is None else torch.from_numpy(rows.documents_BT),
            lengths_B=torch.from_numpy(rows.lengths_B),
        )
        return batch, [(source, move) for (source, _), move in moved.items()]


class DataLoader:
    """Iterator over this rank's micro-batches, ``accumulation`` of them per step; see ``open_dataloader``.

    tokenizer:       the tokenizer of the dataset.
    vocab:           token ids are in 0..vocab-1.
    files:           name of each file -> a fingerprint of its content, to name the one that differs.
    num_samples:     rows of one epoch, over all ranks; None for mixtures, and where only reading tells.
    places_per_epoch: of what samples_consumed counts, those of one epoch: num_samples, or whole steps where epochs end
                     at their borders (training.last_batch).
    end:             samples after which the data end; None where they repeat, or where only reading tells.
    pad_id:          fills places that have no document; never a target.
    masks_documents: whether batches say which token is of which document.
    accumulation:    micro-batches of a step.
    global_batch:    rows of one step, over all ranks (G).
    num_readers:     virtual readers of a dataset that is read while training runs, else 0.
    ends_without_notice: whether the data end, and only reading tells where: filler rows come from readers at their end.
    fingerprint:     SHA-256 in hex of datasets, tokenizer, sequence length, seed and order. A run may be continued
                     only where it is the same.
    step_hash:       what the rows of this rank's current step add to the run's order hash (see ``order_hash``).
    """

    hash_rows = staticmethod(hash_rows)

    def __init__(
        self, opened: DataPipeline, share: RankSlice, options: DataLoaderOptions, samples_consumed: int
    ) -> None:
        self.tokenizer = opened.tokenizer
        self.vocab = opened.tokenizer.vocab_size
        self.num_samples = opened.feeds[0].num_rows if len(opened.feeds) == 1 else None
        self.places_per_epoch: int | None = self.num_samples
        self.end = opened.end
        self.global_batch = share.global_batch
        self.accumulation = share.accumulation
        self.pad_id = opened.packing.pad_id
        self.masks_documents = opened.packing.needs_documents
        self.num_readers = sum(feed.num_readers for feed in opened.feeds)
        self.ends_without_notice = any(feed.ends_without_notice for feed in opened.feeds)
        self.fingerprint = digest([feed.fingerprint for feed in opened.feeds], opened.mixture.fingerprint)
        several = len(opened.feeds) > 1  # of which two may have files of one name
        self.files: Mapping[str, str] = opened.feeds[0].files
        if several:
            self.files = {
                f"{source}: {name}": mark
                for source, feed in zip(opened.names, opened.feeds, strict=True)
                for name, mark in feed.files.items()
            }
        self._opened = opened
        self._share = share
        self._options = options
        self._pins = options.pin_memory and accelerator.pins_memory()
        self._places = [ReaderCursors(feed.num_readers) for feed in opened.feeds]
        self._batches: Iterator[BatchWithCursors | ShardtrainError] | None = None
        self.seek(samples_consumed)

    @cached_property
    def sampled_files(self) -> dict[str, str]:
        """At most 4,096 of ``files``, evenly spread, for checkpoints: with their hashes they are half a megabyte.

        The fingerprint of the data is made of all of them; these only name which one differs.
        """
        return sampled(self.files)

    @cached_property
    def whole_files(self) -> list[WholeFile]:
        """The files of all sources, to be hashed; made when the first rank asks for them."""
        several = len(self._opened.feeds) > 1
        return [
            replace(file, name=f"{source}: {file.name}") if several else file
            for source, feed in zip(self._opened.names, self._opened.feeds, strict=True)
            for file in feed.whole_files()
        ]

    @property
    def samples_consumed(self) -> int:
        """Samples of all steps that were handed out in full, over all ranks; never more than there are."""
        position = self._start + self._handed // self._share.accumulation * self.global_batch
        return position if self.end is None else min(position, self.end)

    @property
    def steps_left(self) -> int | None:
        """Steps from here to the end of the data, the last of which may be smaller; None where they repeat.

        Where only reading tells, None too.
        """
        return None if self.end is None else -(-(self.end - self.samples_consumed) // self.global_batch)

    def seek(self, samples_consumed: int, cursors: npt.NDArray[np.int64] | None = None) -> None:
        """Stand where all ranks together have consumed this many samples.

        ``cursors`` are what ``cursors()`` gave there, over all ranks. Without them datasets that are read as training
        continues are read again up to this point; all others are there at once. Worker processes end, and others begin
        with the next batch.
        """
        self._batches = None
        self._start = samples_consumed
        self._handed = 0
        self.step_hash = 0
        before = self._opened.mixture.rows_before(samples_consumed)
        first = 0
        for feed, places, rows in zip(self._opened.feeds, self._places, before.tolist(), strict=True):
            own = None if cursors is None else cursors[first : first + feed.num_readers]
            feed.seek(rows, own)
            places.begin(rows, own)
            first += feed.num_readers
        self._epochs = self._epochs_after(before.tolist())

    @property
    def has_ended(self) -> bool:
        """Whether the data are known to have ended before the step that comes, or is being read."""
        return self.end is not None and self.samples_consumed >= self.end

    @property
    def rows_of_sources(self) -> dict[str, int]:
        """Rows of each source consumed so far, where there are several."""
        opened = self._opened
        if len(opened.names) < 2:
            return {}
        return dict(zip(opened.names, opened.mixture.rows_before(self.samples_consumed).tolist(), strict=True))

    def cursors(self, samples_consumed: int | None = None) -> npt.NDArray[np.int64]:
        """The cursors of the readers of all feeds, (readers, 3): -1 for those of which another rank knows.

        After all steps that were handed out in full, or after ``samples_consumed``: that, or a step less.
        """
        before = self._opened.mixture.rows_before(
            self.samples_consumed if samples_consumed is None else samples_consumed
        )
        known = [places.at(rows) for places, rows in zip(self._places, before.tolist(), strict=True)]
        return np.concatenate(known)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next micro-batch; StopIteration at the start of a step when the data are known to have ended.

        Raises:
            DataError: at a bad row of a dataset that is read while training runs.
            ConfigError: when a file was changed under the run.
        """
        if self._handed % self._share.accumulation == 0:
            if self.has_ended:
                raise StopIteration
            if self.num_readers:
                for places in self._places:
                    places.mark()
            self.step_hash = 0
            after = self._opened.mixture.rows_before(self.samples_consumed + self.global_batch)
            for source, epoch in enumerate(self._epochs_after(after.tolist())):
                self._enter(source, epoch)
        batch, moved = self._take()
        self.step_hash += self.hash_rows(batch, self._share.first_position(self._start, self._handed))
        for source, move in moved:
            self._places[source].move(move)
            self._enter(source, move.epoch)
        self._handed += 1
        return batch.pin_memory() if self._pins else batch

    def _take(self) -> BatchWithCursors:
        if self._batches is None:
            self._batches = in_order(MicroBatches(self._opened, self._share, self._start), self._options)
        try:
            made = next(self._batches)
        except RuntimeError as error:
            if (dead := death_of_worker(error)) is None:
                raise
            raise dead from error
        if isinstance(made, ShardtrainError):
            raise made
        return made

    def _epochs_after(self, rows: list[int]) -> list[int]:
        """Epoch from 0 of each source after some rows of it."""
        return [feed.epoch_after(count) for feed, count in zip(self._opened.feeds, rows, strict=True)]

    def _enter(self, source: int, epoch: int) -> None:
        if epoch > self._epochs[source]:
            self._epochs[source] = epoch
            if self._opened.feeds[source].passes is None:
                logger.warning("dataset %s is being re-looped (epoch %d)", self._opened.names[source], epoch + 1)
