"""Changes of the data of a trial: uneven targets, documents in separate sequences, and an end of validation data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from functools import partial, partialmethod
from typing import Any

import torch
from torch import Tensor

from shardtrain.config.schema.task_options import OF_NEXT_TOKENS
from shardtrain.data import build_dataset
from shardtrain.data.batch import Batch
from shardtrain.data.documents.encoded import Document
from shardtrain.data.feed import IndexedFeed
from shardtrain.data.loader import DataLoader
from shardtrain.data.row_stream import RowFeed
from shardtrain.ops.targets import IGNORE
from shardtrain.tools.verify.certificate.expected_rows import (
    ExpectedRows,
    ShortDocuments,
    first_difference,
    num_shared_rows,
)
from shardtrain.tools.verify.certificate.trial import Trial, TrialFacts, replaced

EPOCH_ROWS = 12
"""Rows per epoch of training data. The second of three steps of 8 rows then crosses the end of an epoch."""


class TrialBatches:
    """Changes of the micro-batches of one trial, and facts about them."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._has_equal_rows = trial.loaded.config.task.name in OF_NEXT_TOKENS
        self._read_documents: list[list[Document]] = []
        self._expected: ExpectedRows | None = None
        self._difference = ""
        self._num_shared_rows = 0
        self._loader: DataLoader | None = None
        self._rows: dict[str, int] = {}

    def facts(self) -> TrialFacts:
        """Return the facts about all micro-batches so far."""
        if self._trial.separates_documents:
            return TrialFacts(self._difference, self._num_shared_rows)
        return TrialFacts(rows=self._rows)

    def reader(self) -> Callable[[DataLoader], Any]:
        """Return the loader's ``__next__`` with the changes of the trial."""
        read = DataLoader.__next__

        def next_batch(loader: DataLoader) -> Any:
            step = loader.samples_consumed // loader.global_batch + 1
            batch = read(loader)
            # Training reads before validation does.
            self._loader = self._loader or loader
            if loader is self._loader:
                key = str(step)
                self._rows[key] = self._rows.get(key, 0) + _hash_of(batch.sample_ids_B)
            if self._trial.separates_documents:
                return self._separate(batch, loader)
            return keep_some_targets(batch) if self._has_equal_rows else batch

        return next_batch

    @contextlib.contextmanager
    def of_short_epochs(self) -> Iterator[None]:
        """Repeat the training data after ``EPOCH_ROWS`` rows while the block opens data.

        Otherwise three steps would never reach the end of an epoch. Data that are read as a stream keep theirs.
        """
        # The dimension packing reads the rows of shortened documents by its own rule.
        if self._trial.shortens_documents:
            yield
            return
        with contextlib.ExitStack() as patches:
            for feed_class in (IndexedFeed, RowFeed):
                initialize = partial(_with_short_epochs, feed_class.__init__)
                patches.enter_context(replaced(feed_class, "__init__", partialmethod(initialize)))
            yield

    @contextlib.contextmanager
    def of_documents(self) -> Iterator[None]:
        """Shorten documents and record them while the block opens data, if the trial requires it."""
        if not self._trial.shortens_documents:
            yield
            return
        open_encoder = build_dataset.open_encoder
        read_documents = build_dataset.read_documents
        seq_len = self._trial.loaded.config.training.seq_len

        def open_short(*arguments: Any) -> ShortDocuments:
            return ShortDocuments(open_encoder(*arguments), seq_len)

        def read_and_record(*arguments: Any) -> Iterator[Document]:
            documents: list[Document] = []
            self._read_documents.append(documents)
            for document in read_documents(*arguments):
                documents.append(document)
                yield document

        with (
            replaced(build_dataset, "open_encoder", open_short),
            replaced(build_dataset, "read_documents", read_and_record),
        ):
            yield

    def _separate(self, packed: Batch, loader: DataLoader) -> Batch:
        """Return the documents of a packed batch, each in its own sequence, laid out independently."""
        if self._expected is None:
            self._expected = ExpectedRows(loader, self._read_documents)
        expected = self._expected.batch(packed)
        self._difference = self._difference or first_difference(packed, expected)
        expected = keep_some_targets(expected)
        self._num_shared_rows += num_shared_rows(expected)
        return separate_documents(expected, loader.pad_id)


def _with_short_epochs(
    initialize: Callable[..., None], feed: Any, *arguments: Any, **named: Any
) -> None:
    initialize(feed, *arguments, **named)
    # Validation data end after one pass, and are shortened elsewhere.
    if feed.passes is None:
        feed.num_rows = min(feed.num_rows, EPOCH_ROWS)


_KEPT = (0.95, 0.2, 0.6, 0.35, 0.8, 0.1, 0.5, 0.7)
"""Fraction of targets to keep, by sample."""


def keep_some_targets(batch: Batch) -> Batch:
    """Remove targets, unevenly but as a function of the sample.

    If every sequence had the same number of targets, a mean of means would equal the mean over all targets.
    The first target of a sequence stays, so no micro-batch is without targets.
    """
    targets_BT = batch.targets_BT.clone()
    for row, sample in enumerate(batch.sample_ids_B.tolist()):
        generator = torch.Generator().manual_seed(max(0, sample))
        draws_T = torch.rand(targets_BT.shape[1], generator=generator)
        draws_T[(targets_BT[row] != IGNORE).int().argmax()] = 0.0
        targets_BT[row, draws_T >= _KEPT[sample % len(_KEPT)]] = IGNORE
    return replace(batch, targets_BT=targets_BT)


def _hash_of(sample_ids_B: Tensor) -> int:
    """Return a number of the samples of a batch. Sums over batches do not depend on their order."""
    total = 0
    for sample in sample_ids_B.tolist():
        total += (sample + 2) * 2654435761 % 2**31 if sample >= 0 else 0
    return total


def end_after(loader: DataLoader, rows: int) -> None:
    """End a stream of validation data after some rows."""
    if loader.end is not None:
        rows = min(rows, loader.end)
    loader.end = rows
    # A loader of documents reads the end from its pipeline, and one of rows from itself.
    opened: Any = loader._opened
    if is_dataclass(opened) and hasattr(opened, "end"):
        loader._opened = replace(opened, end=rows)  # type: ignore[assignment,type-var]


def separate_documents(batch: Batch, pad_id: int) -> Batch:
    """Return a batch with one document per sequence, followed by padding, and the same targets.

    Raises:
        ValueError: the batch does not mark its documents.
    """
    if batch.documents_BT is None or batch.lengths_B is None:
        raise ValueError("the batch does not mark its documents, so they attend to each other")
    width = batch.tokens_BT.shape[1]
    rows = []
    for row in range(batch.tokens_BT.shape[0]):
        is_text_T = torch.arange(width) < batch.lengths_B[row]
        for document in batch.documents_BT[row].unique(sorted=True):
            # Also documents without targets, because the balance loss of experts counts all tokens.
            is_of_document_T = is_text_T & (batch.documents_BT[row] == document)
            if bool(is_of_document_T.any()):
                rows.append(_one_document(batch, row, is_of_document_T, pad_id))
    if not rows:
        return batch
    columns = [torch.stack(column) for column in zip(*rows, strict=True)]
    tokens_BT, targets_BT, positions_BT, documents_BT, sample_ids_B, lengths_B = columns
    return Batch(tokens_BT, targets_BT, positions_BT, sample_ids_B, documents_BT, lengths_B)


def _one_document(
    batch: Batch, row: int, is_of_document_T: Tensor, pad_id: int
) -> tuple[Tensor, ...]:
    """Return tokens, targets, positions, documents, sample id and length of one document."""
    width = batch.tokens_BT.shape[1]
    length = int(is_of_document_T.sum())
    tokens_T = torch.full((width,), pad_id)
    tokens_T[:length] = batch.tokens_BT[row, is_of_document_T]
    targets_T = torch.full((width,), IGNORE)
    targets_T[:length] = batch.targets_BT[row, is_of_document_T]
    # Positions are counted here, so the positions of the packed sequence are tested, too.
    positions_T = torch.arange(width)
    positions_T[length:] -= length
    documents_T = (torch.arange(width) >= length).long()
    return (
        tokens_T,
        targets_T,
        positions_T,
        documents_T,
        batch.sample_ids_B[row],
        torch.tensor(length),
    )
