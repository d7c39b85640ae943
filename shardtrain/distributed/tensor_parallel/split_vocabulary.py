"""The loss over a vocabulary whose columns are split over tensor-parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain.distributed.mesh import Mesh


class SplitVocabulary:
    """Implements ``cross_entropy.Vocabulary`` for tensor-parallel ranks. All methods are collectives.

    Attributes:
        size: size of the vocabulary, which is the number of columns on all ranks together.
        columns: number of columns per rank. The last ranks may have fewer.
        offset: index of this rank's first column.
    """

    def __init__(self, mesh: Mesh, vocab_size: int) -> None:
        self.size = vocab_size
        self.columns = -(-vocab_size // mesh.size("tp"))
        self.offset = self.columns * mesh.rank("tp")
        self._group = mesh.group("tp")

    def max(self, values: Tensor) -> Tensor:
        """Replace values with their maximum over the ranks, in place."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return values

    def sum(self, values: Tensor) -> Tensor:
        """Replace values with their sum over the ranks, in place."""
        dist.all_reduce(values, group=self._group)
        return values

    def gather(self, values: Tensor) -> Tensor:
        """Stack the values of all ranks along a new first dimension."""
        ranks = [torch.empty_like(values) for _ in range(self._group.size())]
        dist.all_gather(ranks, values, group=self._group)
        return torch.stack(ranks)
