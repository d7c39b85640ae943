"""Changes of the data of a trial: uneven targets, documents in separate sequences, and an end of validation data."""

from __future__ import annotations

from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardtrain.data.batch import Batch
from shardtrain.data.loader import DataLoader
from shardtrain.ops.targets import IGNORE

_KEPT = (0.95, 0.2, 0.6, 0.35, 0.8, 0.1, 0.5, 0.7)
"""Fraction of targets to keep, by sample."""


def keep_some_targets(batch: Batch) -> Batch:
    """Remove targets, unevenly but as a function of the sample.

    If every sequence had the same number of targets, a mean of means would equal the mean over all targets. The first
    target of a sequence stays, so no micro-batch is without targets.
    """
    targets_BT = batch.targets_BT.clone()
    for row, sample in enumerate(batch.sample_ids_B.tolist()):
        generator = torch.Generator().manual_seed(max(0, sample))
        draws_T = torch.rand(targets_BT.shape[1], generator=generator)
        draws_T[(targets_BT[row] != IGNORE).int().argmax()] = 0.0
        targets_BT[row, draws_T >= _KEPT[sample % len(_KEPT)]] = IGNORE
    return replace(batch, targets_BT=targets_BT)


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
    if batch.documents_BT is None:
        raise ValueError("the batch does not mark its documents, so they attend to each other")
    rows = []
    for row in range(batch.tokens_BT.shape[0]):
        for document in batch.documents_BT[row].unique(sorted=True):
            is_of_document_T = batch.documents_BT[row] == document
            if bool((batch.targets_BT[row, is_of_document_T] != IGNORE).any()):
                rows.append(_one_document(batch, row, is_of_document_T, pad_id))
    if not rows:
        return batch
    # Some rows may have no targets at all. The sums over targets are the same without them.
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
