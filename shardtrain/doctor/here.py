"""What a check knows about the rank that it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardtrain.config import Loaded


@dataclass(frozen=True)
class Here:
    """One rank: its place, its device, the configuration of the run, and its line to the other ranks."""

    loaded: Loaded
    rank: int
    size: int
    local_rank: int
    local_size: int
    device: str
    """ "cpu" or "cuda"."""
    limit_seconds: float
    """How long one check may take."""
    store: Any
    """In which the ranks meet."""
    line: Any
    """A ``line.Line`` over it."""
    has_config: bool = True
    """Whether the user named a configuration: the folders and axes of the defaults are of no interest else."""
