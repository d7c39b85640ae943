"""Filler: the tokens of a row that hold no document, and what a model that counts its tokens must know of
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardtrain.data.batch import Batch
from shardtrain.ops.targets import FILLER_DOCUMENT


def mark_filler(batches: Sequence[Batch]) -> list[Batch]:
    """Batches of a model with experts, whose documents say which tokens are filler: those have
    FILLER_DOCUMENT.

    Filler chooses experts like any token, but must count in no balance loss and in no load: rows that are
    padded have the gradients of rows that are not. Text sees no filler either way, which comes after it. Of
    the micro-batches of a step either all have documents afterwards or, where none has filler, those that
    had.
    """
    # Documents cost a mask: they are added where some batch of the step has filler, and then to all.
    has_filler = any(b.lengths_B is not None and bool((b.lengths_B < b.tokens_BT.size(1)).any()) for b in batches)
    if not has_filler:
        return list(batches)
    marked = []
    for batch in batches:
        documents_BT = torch.zeros_like(batch.tokens_BT) if batch.documents_BT is None else batch.documents_BT
        if batch.lengths_B is not None:
            columns_T = torch.arange(documents_BT.size(1))
            documents_BT = documents_BT.masked_fill(columns_T >= batch.lengths_B[:, None], FILLER_DOCUMENT)
        marked.append(replace(batch, documents_BT=documents_BT))
    return marked


def filler_documents(lengths_B: Tensor, columns_BT: Tensor) -> Tensor:
    """Documents (B, T) of rows of one document each and filler behind it, given the column of each token."""
    return (columns_BT >= lengths_B[:, None]).long() * FILLER_DOCUMENT
