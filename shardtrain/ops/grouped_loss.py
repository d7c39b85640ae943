"""Sums of the loss by group of tokens, from the numbers that the loss computes anyway.

A group is a number, such as the number of a data source. Chunks of tokens are divided where the group
changes, so the sum of each piece belongs to one group. The pieces add up to the loss.

Shape suffixes: N tokens, n tokens of a chunk, V vocabulary, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ChunkFunction = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""See ``cross_entropy.ChunkFunction``."""


class GroupedLoss:
    """Adds the losses of the tokens of one forward pass to sums by group."""

    def __init__(self, groups: Sequence[tuple[int, int]], sums_G: Tensor) -> None:
        """Set the groups.

        Args:
            groups: end of a range of tokens and its group, in ascending order. The last end is N.
            sums_G: float64 sums, which are changed.
        """
        self._groups = groups
        self._sums_G = sums_G
        self._start = 0

    def dividing(self, chunk: ChunkFunction) -> ChunkFunction:
        """Return a function like ``chunk`` that also adds to the sums. It must receive all tokens in order."""

        def divided(logits_nV: Tensor, targets_n: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            first = self._start
            self._start += len(targets_n)
            losses = []
            gradients = []
            for start, end, group in self._ranges(first, self._start):
                part = slice(start - first, end - first)
                loss, gradient = chunk(logits_nV[part], targets_n[part], weight)
                self._sums_G[group] += loss
                losses.append(loss)
                gradients.append(gradient)
            if len(losses) == 1:
                return losses[0], gradients[0]
            return torch.stack(losses).sum(), torch.cat(gradients)

        return divided

    def add(self, losses_N: Tensor) -> None:
        """Add the loss of each token."""
        for start, end, group in self._ranges(0, len(losses_N)):
            self._sums_G[group] += losses_N[start:end].sum(dtype=self._sums_G.dtype)

    def _ranges(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Return (start, end, group) of the ranges that cover the tokens ``first`` to ``last`` - 1."""
        ranges = []
        start = first
        for end_of_group, group in self._groups:
            end = min(end_of_group, last)
            if end > start:
                ranges.append((start, end, group))
                start = end
        return ranges
