"""Saving a run and continuing it, on this mesh or any other: see ``folder.py`` (which checkpoint) and ``tensors.py``."""

from __future__ import annotations

from shardtrain.checkpoint.folder import Checkpoints

__all__ = ["Checkpoints"]
