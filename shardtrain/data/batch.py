"""A micro-batch: tokens, targets, positions, and sample ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardtrain.ops import document_mask
from shardtrain.ops.accelerator import to_device
from shardtrain.ops.targets import IGNORE


@dataclass(frozen=True)
class Batch:
    """Rows of one forward and backward pass: B rows of T tokens, all int64.

    Attributes:
        targets_BT: the token that follows each token, or ``IGNORE``.
        positions_BT: position of each token in its sequence or document, from 0.
        sample_ids_B: ids of the rows within the dataset; -1 for a padding row.
        documents_BT: number of each token's document, ascending within a row. A token attends only to earlier
            tokens of its document. None lets every token attend to all earlier tokens.
        lengths_B: number of tokens in each row before its padding. None if rows have no padding.
    """

    tokens_BT: Tensor
    targets_BT: Tensor
    positions_BT: Tensor
    sample_ids_B: Tensor
    documents_BT: Tensor | None = None
    lengths_B: Tensor | None = None

    @property
    def num_targets(self) -> int:
        """Number of targets that count in the loss."""
        return int((self.targets_BT != IGNORE).sum().item())

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding."""
        if self.lengths_B is None:
            return self.tokens_BT.numel()
        return int(self.lengths_B.sum().item())

    @property
    def num_rows(self) -> int:
        """Number of rows without padding rows."""
        return int((self.sample_ids_B >= 0).sum().item())

    def divided(self, length: int) -> Batch:
        """Divide each row into rows of ``length`` tokens, which must divide T. Targets stay the same.

        A part of a document at the start of a new row has positions from 0, because it does not attend to the
        part in the row before.
        """
        B, T = self.tokens_BT.shape
        if length == T:
            return self
        parts = T // length
        positions_BT = self.positions_BT.reshape(B * parts, length)
        documents_BT = None
        is_first_document = torch.ones_like(positions_BT, dtype=torch.bool)
        if self.documents_BT is not None:
            documents_BT = self.documents_BT.reshape(B * parts, length)
            is_first_document = documents_BT == documents_BT[:, :1]
            # Document numbers of a row begin at 0.
            documents_BT = documents_BT - documents_BT[:, :1]
        # Only the first document of a new row may have begun before it.
        from_start_BT = positions_BT - positions_BT[:, :1]
        positions_BT = torch.where(is_first_document, from_start_BT, positions_BT)
        lengths_B = None
        if self.lengths_B is not None:
            part_starts = torch.arange(0, T, length)
            remaining = self.lengths_B[:, None] - part_starts
            lengths_B = remaining.clamp(0, length).flatten()
        return Batch(
            tokens_BT=self.tokens_BT.reshape(B * parts, length),
            targets_BT=self.targets_BT.reshape(B * parts, length),
            positions_BT=positions_BT,
            sample_ids_B=self.sample_ids_B.repeat_interleave(parts),
            documents_BT=documents_BT,
            lengths_B=lengths_B,
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Copy the batch to a device. With ``non_blocking``, the host does not wait for the copy."""
        if non_blocking:
            moved = self._each(lambda tensor: to_device(tensor, device))
        else:
            moved = self._each(lambda tensor: tensor.to(device))
        # Masks are built on the host from the document numbers. Remember the host's copy of these numbers,
        # because copying them back from the device would be slow.
        if self.documents_BT is not None and moved.documents_BT is not None:
            document_mask.remember(moved.documents_BT, self.documents_BT)
        return moved

    def pin_memory(self) -> Batch:
        """Copy the batch to page-locked host memory, from which a GPU can copy while the host continues."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        documents_BT = None if self.documents_BT is None else change(self.documents_BT)
        lengths_B = None if self.lengths_B is None else change(self.lengths_B)
        return Batch(
            tokens_BT=change(self.tokens_BT),
            targets_BT=change(self.targets_BT),
            positions_BT=change(self.positions_BT),
            sample_ids_B=change(self.sample_ids_B),
            documents_BT=documents_BT,
            lengths_B=lengths_B,
        )
