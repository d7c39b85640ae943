"""The first all-reduce of a step: token counts, a checksum of the data, requests to stop, and the state of
a save."""

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
    """Target tokens, the divisor of the loss. Only one of the ranks that read the same rows counts them."""
    num_tokens: int = 0
    """Tokens without padding, for the throughput. Counted once like the targets."""
    num_rows: int = 0
    """Rows without padding rows, counted once like the targets."""
    checksum: int = 0
    """Checksum of the rows, modulo 2^64; see ``data.checksum``."""
    flags: list[float] = field(default_factory=lambda: [0.0] * _NUM_FLAGS)
    """Requests to stop and the state of a save; see ``Resilience.pack_flags``."""

    def pack(self) -> Tensor:
        """Pack into one float64 tensor, in which counts and the 16-bit parts of the checksum are summed
        exactly."""
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
