"""Losses and target tokens of each data source in a step, for ``metrics.per_source_loss``.

Shape suffixes: B rows, t tokens of this rank in a row, S sources.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardtrain.ops.accelerator import sum_dtype, to_device
from shardtrain.ops.grouped_loss import GroupedLoss
from shardtrain.ops.targets import IGNORE


class SourceLosses:
    """Sums over this rank's target tokens of a step.

    Attributes:
        sums_2S: sums of losses, and numbers of target tokens, of each source. float64.
    """

    def __init__(self, num_sources: int, device: torch.device) -> None:
        self._num_sources = num_sources
        self._device = device
        self._sources: Sequence[int] = ()
        # the rows of the current forward pass
        self._rows: slice | None = None
        self.sums_2S = self._zeros()

    def begin_step(self, sources: Sequence[int]) -> None:
        """Set the source of each row of a step: all micro-batches of this rank."""
        self._sources = sources
        self.sums_2S = self._zeros()

    def use_rows(self, first: int, count: int) -> None:
        """Select the rows of the next forward pass. Nothing is summed outside of a step."""
        self._rows = slice(first, first + count) if self._sources else None

    def end_step(self) -> None:
        """Sum nothing until the next ``begin_step``, for example in a validation."""
        self._sources = ()
        self._rows = None

    def grouped(self, targets_Bt: Tensor) -> GroupedLoss | None:
        """Count the targets of the selected rows. Return the sums for their losses, or None outside of a step."""
        if self._rows is None:
            return None
        sources = self._sources[self._rows]
        targets_of_row_B = (targets_Bt != IGNORE).sum(dim=1, dtype=self.sums_2S.dtype)
        sources_B = to_device(torch.tensor(sources), self._device)
        self.sums_2S[1].index_add_(0, sources_B, targets_of_row_B)
        # Join neighbouring rows of the same source into one group: (end in tokens, source).
        groups = []
        for row, source in enumerate(sources):
            is_last = row == len(sources) - 1
            if is_last or sources[row + 1] != source:
                groups.append(((row + 1) * targets_Bt.size(1), source))
        return GroupedLoss(groups, self.sums_2S[0])

    def _zeros(self) -> Tensor:
        return torch.zeros(2, self._num_sources, dtype=sum_dtype(self._device), device=self._device)
