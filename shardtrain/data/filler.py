"""Mark padding tokens, which the statistics of experts must not count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardtrain.data.batch import Batch
from shardtrain.ops.targets import FILLER_DOCUMENT


def mark_filler(batches: Sequence[Batch]) -> list[Batch]:
    """Mark padding tokens in the batches of a step with FILLER_DOCUMENT in ``documents_BT``.

    This is for models with experts. Padding is routed to experts like any token. But it must not count in
    the balance loss and the load, because padded rows must have the same gradients as unpadded rows. If any
    batch of the step has padding, all returned batches have documents.
    Otherwise the batches are returned unchanged.
    """
    # Documents make attention slower, so add them only if there is padding. All micro-batches of a step must
    # have documents, or none.
    has_filler = False
    for batch in batches:
        if batch.lengths_B is not None and bool((batch.lengths_B < batch.tokens_BT.size(1)).any()):
            has_filler = True
            break
    if not has_filler:
        return list(batches)
    marked = []
    for batch in batches:
        documents_BT = batch.documents_BT
        if documents_BT is None:
            documents_BT = torch.zeros_like(batch.tokens_BT)
        if batch.lengths_B is not None:
            columns_T = torch.arange(documents_BT.size(1))
            documents_BT = documents_BT.masked_fill(
                columns_T >= batch.lengths_B[:, None], FILLER_DOCUMENT
            )
        marked.append(replace(batch, documents_BT=documents_BT))
    return marked


def filler_documents(lengths_B: Tensor, columns_BT: Tensor) -> Tensor:
    """Return document numbers (B, T) for rows that consist of one document followed by padding.

    ``columns_BT`` contains the position of each token in its row.
    """
    return (columns_BT >= lengths_B[:, None]).long() * FILLER_DOCUMENT
