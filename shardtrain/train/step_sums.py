"""What ranks add up before each step, in one all-reduce: token counts, the data checksum, stop and save requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardtrain.data import checksum

if TYPE_CHECKING:
    from shardtrain.distributed.mesh import Mesh

_NUM_SAVE_FLAGS = 3


@dataclass
class StepSums:
    """One rank's contribution before ``all_reduce``, the sums over all ranks after it."""

    num_targets: int = 0
    """Target tokens: the divisor of the loss. Ranks that hold the same rows contribute them once."""
    num_rows: int = 0
    checksum: int = 0
    """Of the rows, modulo 2^64; see ``data.checksum``."""
    stop_flag: float = 0.0
    """Above 0 where a rank was asked to stop; see ``signals.StopRequest.flag``."""
    save_flags: list[float] = field(default_factory=lambda: [0.0] * _NUM_SAVE_FLAGS)
    """Of a save in flight; see ``async_save.Saving.pack_flags``."""

    def pack(self) -> Tensor:
        """As float64, in which counts and the 16-bit parts of the checksum add up exactly."""
        parts = [*checksum.split(self.checksum), self.stop_flag, *self.save_flags]
        return torch.tensor([self.num_targets, self.num_rows, *parts], dtype=torch.float64)

    @classmethod
    def unpack(cls, packed: Tensor) -> StepSums:
        """Inverse of ``pack``, and of a sum of packed ones."""
        num_targets, num_rows, *rest = packed.tolist()
        *hash_parts, stop_flag = rest[:-_NUM_SAVE_FLAGS]
        save_flags = rest[-_NUM_SAVE_FLAGS:]
        return cls(int(num_targets), int(num_rows), checksum.join(hash_parts), stop_flag, save_flags)

    def all_reduce(self, mesh: Mesh) -> StepSums:
        """The sums over all ranks of the run (a collective)."""
        return self.unpack(mesh.sum_of_all(self.pack().to(mesh.device)))
