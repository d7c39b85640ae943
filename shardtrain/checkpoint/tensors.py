"""Tensors to and from a folder, through PyTorch's distributed checkpoint (DCP): each rank writes and reads its shards.

Tensors are found by name and global shape, so a checkpoint loads onto any mesh.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
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
    """Fill the tensors in place (a collective).

    Raises:
        CheckpointError: for a missing name, another shape, unreadable bytes, or a name that the checkpoint has and the
            run has not, where the run has others of the same section ("model", "optimizer").
    """
    _refuse_surplus(tensors, folder)
    try:
        dcp.load(dict(tensors), checkpoint_id=str(folder))
    except CheckpointException as error:  # what a rank meets comes as this; any other error is a lost peer
        raise CheckpointError(f"checkpoint {folder} cannot be loaded: {_first_cause(error)}") from error


def _refuse_surplus(tensors: Mapping[str, Tensor], folder: Path) -> None:
    # DCP reads what it is asked for and says nothing of the rest: a deeper model would lose its last layers in silence
    try:
        saved = dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    except Exception as error:  # a file of DCP's that is cut short fails in as many ways as pickle has
        raise CheckpointError(f"checkpoint {folder}: {METADATA} cannot be read: {_first_cause(error)}") from error
    names, sections = sorted(saved), {name.partition(".")[0] for name in tensors}
    wanted = torch.tensor(
        [name in tensors or name.partition(".")[0] not in sections for name in names], dtype=torch.int32
    )
    if dist.is_initialized():  # a pipeline stage holds some of the names only
        dist.all_reduce(wanted, dist.ReduceOp.MAX)
    surplus = [name for name, is_wanted in zip(names, wanted.tolist(), strict=True) if not is_wanted]
    if surplus:
        raise CheckpointError(
            f"checkpoint {folder} holds {len(surplus)} tensors that this run has not, such as {surplus[0]}; use the "
            "model that it was saved from"
        )


def cast(tensors: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Copies of floating-point tensors in another type, for weights-only saves."""
    return {name: tensor.detach().to(getattr(torch, dtype)) for name, tensor in tensors.items()}


def _first_cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = sorted(error.failures.items())[0]
        return f"rank {rank}: {type(cause).__name__}: {cause}".splitlines()[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]
