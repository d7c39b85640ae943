"""Tensors to and from a folder, through PyTorch's distributed checkpoint (DCP): each rank writes and reads its shards.

Tensors are found by name and global shape, so a checkpoint loads onto any mesh.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from shardtrain.errors import CheckpointError, StorageError

METADATA = ".metadata"
"""DCP writes this file last: without it a folder is no checkpoint."""


def write(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write every rank's shards into an existing, empty folder (a collective)."""
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    try:
        dcp.save(dict(tensors), checkpoint_id=str(folder))
    except CheckpointException as error:  # a BaseException: "except Exception" would miss it
        raise StorageError(f"checkpoint {folder} could not be written: {_first_cause(error)}") from error


def read(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Fill the tensors in place (a collective); raises CheckpointError for a missing name, another shape, bad bytes."""
    try:
        dcp.load(dict(tensors), checkpoint_id=str(folder))
    except (CheckpointException, RuntimeError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"checkpoint {folder} cannot be loaded: {_first_cause(error)}") from error


def cast(tensors: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Copies of floating-point tensors in another type, for weights-only saves."""
    return {name: tensor.detach().to(getattr(torch, dtype)) for name, tensor in tensors.items()}


def _first_cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = sorted(error.failures.items())[0]
        return f"rank {rank}: {type(cause).__name__}: {cause}".splitlines()[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]
