"""Mark padding tokens for models whose statistics must not count them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardtrain.data.batch import Batch
from shardtrain.ops.targets import FILLER_DOCUMENT


def mark_filler(batches: Sequence[Batch]) -> list[Batch]:
    """Mark padding tokens in the batches of a step for a model with experts, with FILLER_DOCUMENT in
    ``documents_BT``.

    Padding is routed to experts like any token, but must not count in the balance loss or the load, so that
    padded rows have the gradients of unpadded rows. Text does not attend to padding, which follows it. If
    any batch of the step has padding, all batches have documents afterwards; otherwise the batches are
    returned unchanged.
    """
    # documents need a mask, so add them only if a batch of the step has padding, and then to all batches
    has_filler = False
    for batch in batches:
        if batch.lengths_B is not None and bool((batch.lengths_B < batch.tokens_BT.size(1)).any()):
            has_filler = True
            break
    if not has_filler:
        return list(batches)
    marked = []
    for batch in batches:
        documents_BT = (
            torch.zeros_like(batch.tokens_BT) if batch.documents_BT is None else batch.documents_BT
        )
        if batch.lengths_B is not None:
            columns_T = torch.arange(documents_BT.size(1))
            documents_BT = documents_BT.masked_fill(
                columns_T >= batch.lengths_B[:, None], FILLER_DOCUMENT
            )
        marked.append(replace(batch, documents_BT=documents_BT))
    return marked


def filler_documents(lengths_B: Tensor, columns_BT: Tensor) -> Tensor:
    """Return documents (B, T) for rows of one document followed by padding, given the column of
    each token.
    """
    return (columns_BT >= lengths_B[:, None]).long() * FILLER_DOCUMENT
