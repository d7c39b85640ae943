"""What a check knows about the rank that it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardtrain.config import Loaded

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RankContext:
    """One rank: its place, its device, the configuration of the run, and its line to the other ranks."""

    loaded: Loaded
    rank: int
    size: int
    local_rank: int
    local_size: int
    device: str
    """ "cpu", "cuda" or "xpu"."""
    limit_seconds: float
    """How long one check may take."""
    store: Any
    """In which the ranks meet."""
    line: Any
    """A ``StoreChannel`` over it."""
    num_ranks: int = 0
    """Of the run that is planned, for which this is a look at some of its hosts; 0 for as many as are here."""
    has_config: bool = True
    """Whether the user named a configuration: the folders and axes of the defaults are of no interest else."""

    @property
    def kind(self) -> str:
        """ "cpu" or "accelerator", by which sizes are chosen."""
        return "cpu" if self.device == "cpu" else "accelerator"

    def torch_device(self) -> torch.device:
        """The device of this rank, made the current one of this thread: each check has a thread of its own."""
        from shardtrain.ops import accelerator

        return accelerator.of_rank(self.device, self.local_rank)
