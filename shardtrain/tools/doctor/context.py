"""State of one rank that its checks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardtrain.config import Loaded

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RankContext:
    """One rank of the doctor, and its connection to the other ranks.

    Attributes:
        device: "cpu", "cuda" or "xpu".
        limit_seconds: Time limit of one check.
        store: Store shared by all ranks.
        line: ``StoreChannel`` over the store.
        num_ranks: Number of ranks of the planned run, if the doctor runs on only part of its hosts. 0 means
            ``size``.
        has_config: True if the user passed a configuration. Without one, folders and mesh axes are not
            relevant.
    """

    loaded: Loaded
    rank: int
    size: int
    local_rank: int
    local_size: int
    device: str
    limit_seconds: float
    store: Any
    line: Any
    num_ranks: int = 0
    has_config: bool = True

    @property
    def kind(self) -> str:
        """Kind of device, "cpu" or "accelerator", which determines the size of tests."""
        if self.device == "cpu":
            return "cpu"
        return "accelerator"

    def torch_device(self) -> torch.device:
        """Return this rank's device and make it current in this thread. Each check has its own thread."""
        from shardtrain.ops import accelerator

        return accelerator.of_rank(self.device, self.local_rank)
