"""One micro-batch as the model sees it: tokens in, targets out, positions, and which samples they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardtrain.ops import document_mask
from shardtrain.ops.accelerator import to_device
from shardtrain.ops.targets import FILLER_DOCUMENT, IGNORE


@dataclass(frozen=True)
class Batch:
    """Rows of one forward and backward pass; B rows of T tokens, all int64.

    ``targets_BT[b, t]`` is the token that follows ``tokens_BT[b, t]``, or ``IGNORE``. ``positions_BT`` are the places
    of the tokens in their sequence or document, from 0. ``sample_ids_B`` names the rows within the dataset; -1 is a
    filler row. ``documents_BT`` numbers the documents of a row, ascending along it: a token attends to earlier tokens
    of its own number alone. None lets every token attend to all before it. ``lengths_B`` is how many tokens of each row
    are text; what follows them is filler. None says that all are.
    """

    tokens_BT: Tensor
    targets_BT: Tensor
    positions_BT: Tensor
    sample_ids_B: Tensor
    documents_BT: Tensor | None = None
    lengths_B: Tensor | None = None

    @property
    def num_targets(self) -> int:
        """Targets that count in the loss."""
        return int((self.targets_BT != IGNORE).sum().item())

    @property
    def num_rows(self) -> int:
        """Rows that are not filler."""
        return int((self.sample_ids_B >= 0).sum().item())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on a device; with ``non_blocking`` the copy does not wait for the device's other work."""
        moved = self._each(lambda tensor: to_device(tensor, device) if non_blocking else tensor.to(device))
        if self.documents_BT is not None and moved.documents_BT is not None:
            document_mask.remember(moved.documents_BT, self.documents_BT)
        return moved

    def pin_memory(self) -> Batch:
        """The same batch in page-locked host memory, which a GPU can copy from while the host continues."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(
            tokens_BT=change(self.tokens_BT),
            targets_BT=change(self.targets_BT),
            positions_BT=change(self.positions_BT),
            sample_ids_B=change(self.sample_ids_B),
            documents_BT=None if self.documents_BT is None else change(self.documents_BT),
            lengths_B=None if self.lengths_B is None else change(self.lengths_B),
        )


def mark_filler(batches: Sequence[Batch]) -> list[Batch]:
    """Batches of a model with experts, whose documents say which tokens are filler: those have FILLER_DOCUMENT.

    Filler chooses experts like any token, but must count in no balance loss and in no load: rows that are padded have
    the gradients of rows that are not. Text sees no filler either way, which comes after it. Of the micro-batches of a
    step either all have documents afterwards or, where none has filler, those that had.
    """
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
