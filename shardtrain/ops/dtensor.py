"""Which part of a parameter this rank holds: the one place that reads DTensor placements."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


def is_distributed(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor. Where nobody has imported them, which takes half a second, nobody has made one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """The memory that this rank holds of a tensor; the tensor itself when it is not distributed."""
    return tensor.to_local() if is_distributed(tensor) else tensor


def sharded_dim(placement: Placement) -> int | None:
    """The tensor dimension that a placement splits, or None when every rank of the axis holds all of it."""
    from torch.distributed.tensor.placement_types import Shard

    # FSDP over tensor parallelism is a private placement (_StridedShard), a subclass of Shard or not by version
    splits = isinstance(placement, Shard) or type(placement).__name__ == "_StridedShard"
    return int(placement.dim) if splits else None  # type: ignore[attr-defined]


def split_axes(tensor: Tensor) -> tuple[int, ...]:
    """Axes of the tensor's own mesh, with more than one rank, over which it is split."""
    if not is_distributed(tensor):
        return ()
    placements = enumerate(tensor.placements)
    return tuple(i for i, p in placements if sharded_dim(p) is not None and tensor.device_mesh.size(i) > 1)


def local_slices(tensor: Tensor, place: Sequence[int] | None = None) -> tuple[slice, ...]:
    """Where a rank's part lies in the whole tensor, one slice per dimension.

    ``place`` is the rank's coordinate on the tensor's mesh, one number per axis; this rank's unless given.

    Splits are those of ``torch.chunk``. Where two axes split one dimension, plain shards come first, left to right,
    and strided ones cut what those left: FSDP cuts what tensor parallelism left, though its axis is further left.
    """
    if not is_distributed(tensor):
        return tuple(slice(0, size) for size in tensor.shape)
    slices = [(0, size) for size in tensor.shape]
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate() if place is None else place
    assert coordinate is not None, "a rank asks about a tensor of a mesh that it is not part of"

    # The sort is stable: plain shards keep the order of their axes, and strided ones come after them
    placements = list(enumerate(tensor.placements))
    strided_last = sorted(placements, key=lambda item: type(item[1]).__name__ == "_StridedShard")
    for axis, placement in strided_last:
        dim = sharded_dim(placement)
        if dim is None:
            continue
        # As torch.chunk: equal parts rounded up, so that the last ranks may have less or nothing
        start, stop = slices[dim]
        chunk = -(-(stop - start) // mesh.size(axis))
        first = min(start + chunk * coordinate[axis], stop)
        slices[dim] = (first, min(first + chunk, stop))
    return tuple(slice(start, stop) for start, stop in slices)


def to_full(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank (a collective when it is distributed); for tests, export and verification."""
    if not is_distributed(tensor):
        return tensor
    # Two gathers where FSDP cuts what tensor parallelism left are right here, and PyTorch's hint about their speed is
    # noise. The level is set once only, because setting it empties the caches of all loggers
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    if logger.level != logging.ERROR:
        logger.setLevel(logging.ERROR)
    return tensor.full_tensor()


NORM_CHUNK_NUMEL = 1 << 16
"""Numbers that are squared at a time on a CPU: 512 KiB in float64, which a core's second-level cache holds."""


def squared_norm(tensors: list[Tensor]) -> Tensor:
    """Sum of squares of local tensors, a float64 scalar on their device; there must be one tensor at least.

    As accurate as float64 on a CPU, in chunks, so that no copy of a tensor is made. PyTorch's own norm adds float32
    squares up in a few chains there: 4e-6 off at half a million numbers, 5e-3 at 67 million, by an amount that depends
    on how a tensor is split. Accelerators add in a tree, which keeps float32 sums within 1e-6; their squares are added
    over tensors in float64.
    """
    device = tensors[0].device
    if device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors, 2.0, dtype=torch.float32)).double().square().sum()
    # One buffer in float64 for all chunks of all tensors: the copy converts, the dot product squares and adds
    total = torch.zeros((), dtype=torch.float64)
    buffer = torch.empty(min(NORM_CHUNK_NUMEL, max(tensor.numel() for tensor in tensors)), dtype=torch.float64)
    for tensor in tensors:
        for chunk in tensor.detach().reshape(-1).split(NORM_CHUNK_NUMEL):
            wide = buffer[: chunk.numel()].copy_(chunk)
            total += torch.dot(wide, wide)
    return total
