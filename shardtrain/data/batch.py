"""One micro-batch as the model sees it: tokens in, targets out, positions, and which samples they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardtrain.loss import IGNORE


@dataclass(frozen=True)
class Batch:
    """Rows of one forward and backward pass; B rows of T tokens, all int64.

    ``targets_BT[b, t]`` is the token that follows ``tokens_BT[b, t]``, or ``IGNORE``. ``positions_BT`` are the places
    of the tokens in their sequence, from 0. ``sample_ids_B`` names the rows within the dataset; -1 is a filler row.
    """

    tokens_BT: Tensor
    targets_BT: Tensor
    positions_BT: Tensor
    sample_ids_B: Tensor

    @property
    def num_targets(self) -> int:
        """Targets that count in the loss."""
        return int((self.targets_BT != IGNORE).sum().item())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on a device; ``non_blocking`` overlaps the copy when the batch is in pinned memory."""
        return Batch(*(tensor.to(device, non_blocking=non_blocking) for tensor in self._tensors()))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked host memory, which a GPU can copy from while the host goes on."""
        return Batch(*(tensor.pin_memory() for tensor in self._tensors()))

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.tokens_BT, self.targets_BT, self.positions_BT, self.sample_ids_B
