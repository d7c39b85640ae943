"""Data loader for the rows of a task. It has the same interface as ``loader.DataLoader``.

The order of rows, their division among ranks, and the position from which a run resumes are the same as in
``loader.DataLoader``. The last batch of the data may have fewer rows. If a rank has no rows, it gets a row
that does not count, because every rank must take part in the collectives of a step.

If ``last_batch`` is "keep" or "discard", an epoch always consists of complete steps. Its N rows then take E
places in the stream, where E is N rounded up ("keep") or down ("discard") to complete steps.
Positions are counted in places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardtrain.config.schema import DataLoaderOptions
from shardtrain.data import checksum
from shardtrain.data.digest import digest
from shardtrain.data.loader import BatchWithCursors, DataLoader, RankSlice
from shardtrain.data.mix import Mixture, Stage
from shardtrain.data.order import sample_at
from shardtrain.data.streaming.reader_cursors import ReaderCursors
from shardtrain.data.workers import in_order
from shardtrain.ops import accelerator
from shardtrain.ops.accelerator import to_device
from shardtrain.utils.errors import ConfigError, Problem, ShardtrainError

Rows = Sequence[Any]
"""Rows by number.

They may have the attributes ``fingerprint`` (of their content, in hex) and ``files`` (name -> fingerprint).
"""
Collate = Callable[[list[Any]], dict[str, Tensor]]
"""Converts rows, at least one, to named tensors."""


@dataclass(frozen=True)
class RowBatch:
    """A batch with the tensors that a task's ``collate`` returns, such as ``batch["tokens"]``.

    ``sample_ids_B`` is -1 for a padding row.
    """

    tensors: Mapping[str, Tensor]
    sample_ids_B: Tensor
    num_targets: int
    """Number of targets. The loss is divided by its sum over all batches of a step."""
    num_tokens: int
    """Number of tokens without padding."""

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor with a name."""
        return self.tensors[name]

    @property
    def num_rows(self) -> int:
        """Number of rows without padding rows."""
        return int((self.sample_ids_B >= 0).sum())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> RowBatch:
        """Return the batch on a device. The sample ids stay on the host."""
        # ``to_device`` pins the memory first, so the host does not wait for the copy.
        if non_blocking:
            return self._each(lambda tensor: to_device(tensor, device))
        return self._each(lambda tensor: tensor.to(device))

    def pin_memory(self) -> RowBatch:
        """Return the batch in page-locked host memory."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> RowBatch:
        moved = {name: change(tensor) for name, tensor in self.tensors.items()}
        return RowBatch(moved, self.sample_ids_B, self.num_targets, self.num_tokens)


class RowFeed:
    """A feed of rows, in shuffled order or, if ``seed`` is None, in their own order."""

    num_readers = 0
    has_unknown_end = False
    mean_targets = 1.0

    def __init__(self, rows: Rows, seed: int | None, passes: int | None) -> None:
        self.rows = rows
        self._seed = seed
        self.passes = passes
        self.num_rows = len(rows)
        self.files: Mapping[str, str] = getattr(rows, "files", {})
        fingerprint = getattr(rows, "fingerprint", None) or fingerprint_of(rows)
        self.fingerprint = digest(fingerprint, seed)

    def rows_at(self, start: int, stop: int) -> list[int]:
        """Return the numbers of the rows at positions start..stop-1 of the order."""
        positions = np.arange(start, stop, dtype=np.int64)
        numbers = positions % self.num_rows
        if self._seed is not None and len(positions):
            numbers = sample_at(positions, self.num_rows, self._seed)
        return [int(number) for number in numbers]

    def read(self, k: int, number: int) -> Any:
        """Return row ``number``, which is at position ``k`` of the order, as an input for ``collate``."""
        return self.rows[number]

    def seek(self, rows: int, cursors: npt.NDArray[np.int64] | None) -> None:
        """No-op: the position is an argument of ``rows_at``."""

    def epoch_after(self, rows: int) -> int:
        return max(0, rows - 1) // self.num_rows


class RowBatches(torch.utils.data.Dataset[BatchWithCursors | ShardtrainError]):
    """A rank's batches, numbered from a start position in the stream."""

    def __init__(self, stream: RowDataLoader, samples_consumed: int) -> None:
        self._feed = stream.feed
        self._collate = stream.collate
        self._count = stream.count_targets
        self._lengths = stream.lengths
        self._share = stream.share
        self._end = stream.end
        self._start = samples_consumed
        self._num_rows = stream.feed.num_rows
        self._places_per_epoch = stream.places_per_epoch

    def __getitem__(self, number: int) -> BatchWithCursors | ShardtrainError:
        """Return a batch, or an error as a value.

        If a worker raised the error, PyTorch would pass it to the rank as the text of a traceback.
        """
        place = self._share.first_position(self._start, number)
        positions = self._positions(place)
        numbers = self._feed.rows_at(positions.start, positions.stop)
        try:
            # A rank without rows uses the first row, which does not count.
            keys = list(zip(positions, numbers, strict=False))
            if not keys:
                keys = [(0, 0)]
            rows = [self._feed.read(k, row_number) for k, row_number in keys]
            tensors = self._collate(rows)
            num_targets = 0
            if numbers:
                num_targets = self._count(tensors)
        except ShardtrainError as error:
            return error
        ids = torch.tensor(numbers or [-1], dtype=torch.int64)
        # If the task does not know the lengths of rows, use the number of targets as the number of tokens.
        num_tokens = 0
        for row_number in numbers:
            num_tokens += sum(self._lengths(self._feed.rows[row_number]))
        num_tokens = num_tokens or num_targets
        return RowBatch(tensors, ids, num_targets, num_tokens), []  # type: ignore[return-value]

    def _positions(self, place: int) -> range:
        """Return the positions in the order of rows for the batch that starts at a place of the stream.

        Empty at the end of the data.
        """
        size = self._share.local_batch_size
        if self._end is not None:
            size = min(size, max(0, self._end - place))
        if self._places_per_epoch == self._num_rows:
            return range(place, place + size)
        # An epoch consists of complete steps. With "keep", its last places have no row. With "discard", its
        # last rows have no place. In both cases, the next epoch starts with its first row.
        epoch, within = divmod(place, self._places_per_epoch)
        first = epoch * self._num_rows + within
        last = (epoch + 1) * self._num_rows
        return range(first, max(first, min(first + size, last)))


class RowDataLoader(DataLoader):
    """Data loader for the rows of a task."""

    places_per_epoch: int

    def __init__(
        self,
        feed: RowFeed,
        collate: Collate,
        count_targets: Callable[[Mapping[str, Tensor]], int],
        lengths: Callable[[Any], Sequence[int]],
        share: RankSlice,
        options: DataLoaderOptions,
        vocab: int = 0,
        last_batch: str = "rollover",
    ) -> None:
        self.feed = feed
        self.collate = collate
        self.count_targets = count_targets
        self.lengths = lengths
        self.share = share
        self.vocab = vocab
        self.pad_id = 0
        self.masks_documents = False
        self.num_samples = feed.num_rows
        self.files = dict(feed.files)
        self.fingerprint = feed.fingerprint
        self.places_per_epoch = feed.num_rows
        if last_batch != "rollover":
            steps, rest = divmod(feed.num_rows, share.global_batch)
            if last_batch == "keep" and rest:
                steps += 1
            self.places_per_epoch = steps * share.global_batch
            # The rows at a place depend on the size of a step. So a run can resume only with the same size.
            self.fingerprint = digest(self.fingerprint, last_batch, share.global_batch)
        if not self.places_per_epoch:
            raise ConfigError(
                Problem(
                    "training.last_batch",
                    last_batch,
                    rule=f"discards all {feed.num_rows} rows, because a step needs {share.global_batch} rows",
                    fix='use "keep" or a smaller batch',
                )
            )
        self.end = None
        if feed.passes is not None:
            self.end = feed.passes * self.places_per_epoch
        self.num_readers = 0
        self.has_unknown_end = False
        self._opened = _Opened(feed)  # type: ignore[assignment]
        self._share = share
        self._options = options
        self._pin_memory = options.pin_memory and accelerator.pins_memory()
        self._reader_cursors = [ReaderCursors(0)]
        self.seek(0)

    def hash_rows(self, batch: RowBatch, first_position: int) -> int:  # type: ignore[override]
        """Hash the numbers of a batch's rows. Their contents need no hash, because a fingerprint covers them."""
        return checksum.hash_numbers(batch.sample_ids_B.tolist(), first_position)

    @cached_property
    def sequence_lengths(self) -> Counter[int]:
        """Number of sequences of each length in an epoch.

        Empty if the task does not know the lengths of its rows.
        """
        counts = Counter[int]()
        for row in self.feed.rows:
            lengths = self.lengths(row)
            if not lengths:
                break
            counts.update(lengths)
        return counts

    def _epochs_after(self, rows: list[int]) -> list[int]:
        epochs = []
        for count in rows:
            # Positions count places, and the feed counts rows. An epoch may have more or fewer places than
            # rows.
            rows_of_feed = -(-count * self.feed.num_rows // self.places_per_epoch)
            epochs.append(self.feed.epoch_after(rows_of_feed))
        return epochs

    def _next_batch(self) -> BatchWithCursors:
        if self._batches is None:
            self._batches = in_order(RowBatches(self, self._start), self._options)
        return super()._next_batch()


class _Opened:
    """Replaces ``DataPipeline`` for a single feed. It has only the attributes that ``DataLoader`` uses."""

    def __init__(self, feed: RowFeed) -> None:
        self.feeds = [feed]
        self.names = ["training"]
        self.mixture = Mixture([Stage((1.0,))])


def fingerprint_of(value: Any) -> str:
    """Return the SHA-256, in hex, of rows of plain values, arrays and tensors, in lists, tuples and dicts.

    >>> fingerprint_of([(1, "a")]) == fingerprint_of([(1, "a")]) != fingerprint_of([(1, "b")])
    True
    """
    return digest(*(_plain(row) for row in value))


def _plain(value: Any) -> Any:
    """Convert a value to plain values for ``digest``, with the hash of each array."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        # Arrays with equal bytes may differ in dtype or shape.
        content = np.ascontiguousarray(value).tobytes()
        return digest(value.dtype.str, value.shape, content)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
