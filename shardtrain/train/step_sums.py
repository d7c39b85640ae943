"""The all-reduce that begins a step: token counts, the checksum of the data, requests to stop and to save."""

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
    """One rank's contribution before ``all_reduce``, the sums over all ranks after it."""

    num_targets: int = 0
    """Target tokens: the divisor of the loss. Ranks that hold the same rows contribute them once."""
    num_tokens: int = 0
    """Tokens that the model computes with, without filler: for throughput. Counted once like the targets."""
    num_rows: int = 0
    """Rows that are not filler, counted once like the targets."""
    checksum: int = 0
    """Of the rows, modulo 2^64; see ``data.checksum``."""
    flags: list[float] = field(default_factory=lambda: [0.0] * _NUM_FLAGS)
    """Requests to stop and the state of a save; see ``Resilience.pack_flags``."""

    def pack(self) -> Tensor:
        """As float64, in which counts and the 16-bit parts of the checksum add up exactly."""
        counts = [self.num_targets, self.num_tokens, self.num_rows, *checksum.split(self.checksum)]
        return torch.tensor([*counts, *self.flags], dtype=torch.float64)

    @classmethod
    def unpack(cls, packed: Tensor) -> StepSums:
        """Inverse of ``pack``, and of a sum of packed ones."""
        numbers = packed.tolist()
        return cls(
            num_targets=int(numbers[0]),
            num_tokens=int(numbers[1]),
            num_rows=int(numbers[2]),
            checksum=checksum.join(numbers[3:-_NUM_FLAGS]),
            flags=numbers[-_NUM_FLAGS:],
        )

    def all_reduce(self, mesh: Mesh) -> StepSums:
        """The sums over all ranks (a collective), of a tensor on the CPU, so that no rank waits for its device."""
        return self.unpack(mesh.sum_of_all(self.pack()))
