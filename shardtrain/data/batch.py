"""One micro-batch as the model sees it: tokens in, targets out, positions, and which samples they are."""

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
    def num_tokens(self) -> int:
        """Tokens that the model computes with, without filler."""
        return self.tokens_BT.numel() if self.lengths_B is None else int(self.lengths_B.sum().item())

    @property
    def num_rows(self) -> int:
        """Rows that are not filler."""
        return int((self.sample_ids_B >= 0).sum().item())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on a device; with ``non_blocking`` the copy does not wait for the device's other work."""
        if non_blocking:
            moved = self._each(lambda tensor: to_device(tensor, device))
        else:
            moved = self._each(lambda tensor: tensor.to(device))
        # Masks are built from what the host knows of the documents, without a copy back from the device.
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
