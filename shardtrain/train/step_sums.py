"""The first all-reduce of a step. It sums token counts, a checksum of the data, and flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardtrain.data import checksum

if TYPE_CHECKING:
    from shardtrain.distributed.mesh import Mesh

_NUM_FLAGS = 4


@dataclass
class StepSums:
    """Values of one rank before ``all_reduce``, and the sums over all ranks after it."""

    num_targets: int = 0
    """Number of target tokens, by which the loss is divided. If several ranks read the same rows, only one
    of these ranks counts the tokens.
    """
    num_tokens: int = 0
    """Number of tokens without padding, for the throughput. Counted on one rank, like the targets."""
    num_rows: int = 0
    """Number of rows without padding rows. Counted on one rank, like the targets."""
    checksum: int = 0
    """Checksum of the rows, modulo 2^64; see ``data.checksum``."""
    flags: list[float] = field(default_factory=lambda: [0.0] * _NUM_FLAGS)
    """Requests to stop and the state of a save; see ``Resilience.pack_flags``."""

    def pack(self) -> Tensor:
        """Pack all values into one float64 tensor.

        The checksum is split into parts of 16 bits, because float64 sums of larger numbers may not be exact.
        """
        counts = [self.num_targets, self.num_tokens, self.num_rows, *checksum.split(self.checksum)]
        return torch.tensor([*counts, *self.flags], dtype=torch.float64)

    @classmethod
    def unpack(cls, packed: Tensor) -> StepSums:
        """Unpack a tensor from ``pack``, or a sum of such tensors."""
        numbers = packed.tolist()
        return cls(
            num_targets=int(numbers[0]),
            num_tokens=int(numbers[1]),
            num_rows=int(numbers[2]),
            checksum=checksum.join(numbers[3:-_NUM_FLAGS]),
            flags=numbers[-_NUM_FLAGS:],
        )

    def all_reduce(self, mesh: Mesh) -> StepSums:
        """Return the sums over all ranks (a collective).

        The tensor is on the CPU, so no rank waits for its device.
        """
        return self.unpack(mesh.sum_of_all(self.pack()))
