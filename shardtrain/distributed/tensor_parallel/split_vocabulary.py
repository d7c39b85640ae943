"""The loss over a vocabulary whose columns are split over tensor-parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain.distributed.mesh import Mesh


class SplitVocabulary:
    """The vocabulary split over tensor-parallel ranks, for the loss (``cross_entropy.Vocabulary``)."""

    def __init__(self, mesh: Mesh, vocab_size: int) -> None:
        self.size = vocab_size
        self.columns = -(-vocab_size // mesh.size("tp"))
        self.offset = self.columns * mesh.rank("tp")
        self._group = mesh.group("tp")

    def max(self, values: Tensor) -> Tensor:
        """Largest value over the ranks, in place."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return values

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        dist.all_reduce(values, group=self._group)
        return values

    def gather(self, values: Tensor) -> Tensor:
        """The values of each rank, along a new first dimension."""
        ranks = [torch.empty_like(values) for _ in range(self._group.size())]
        dist.all_gather(ranks, values, group=self._group)
        return torch.stack(ranks)
