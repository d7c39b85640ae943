"""Saving a run and continuing it on any mesh: see ``folder.py`` (which checkpoint) and ``tensors.py`` (its bytes)."""

from __future__ import annotations

from shardtrain.checkpoint.folder import Checkpoints

__all__ = ["Checkpoints"]
