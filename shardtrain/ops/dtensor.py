"""Local parts of parameters. This is the only module that reads DTensor placements."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from shardtrain.ops.accelerator import sum_dtype

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


def is_distributed(tensor: Tensor) -> TypeGuard[DTensor]:
    """True if a tensor is a DTensor. Do not import their module, which takes half a second.

    If no other code has imported it, no DTensor exists.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor without a copy, or the tensor itself if it is not distributed."""
    return tensor.to_local() if is_distributed(tensor) else tensor


def sharded_dim(placement: Placement) -> int | None:
    """Return the tensor dimension that a placement shards, or None for other placements."""
    from torch.distributed.tensor.placement_types import Shard

    # FSDP over tensor parallelism has the private placement _StridedShard, which is a subclass of Shard
    # in some versions of PyTorch.
    is_sharded = isinstance(placement, Shard) or type(placement).__name__ == "_StridedShard"
    return int(placement.dim) if is_sharded else None  # type: ignore[attr-defined]


def split_axes(tensor: Tensor) -> tuple[int, ...]:
    """Return the axes of the tensor's mesh, with more than one rank, over which it is sharded."""
    if not is_distributed(tensor):
        return ()
    axes = []
    for axis, placement in enumerate(tensor.placements):
        if sharded_dim(placement) is not None and tensor.device_mesh.size(axis) > 1:
            axes.append(axis)
    return tuple(axes)


def local_slices(tensor: Tensor, place: Sequence[int] | None = None) -> tuple[slice, ...]:
    """Return the position of a rank's part in the full tensor, one slice per dimension.

    ``place`` is the rank's coordinate on the tensor's mesh, one number per axis; it defaults to
    this rank's.

    A dimension is split as by ``torch.chunk``. If two axes shard one dimension, plain shards are
    applied first, from left to right, and strided shards split the result: FSDP splits the part of
    a tensor-parallel rank, although its axis is further left.
    """
    if not is_distributed(tensor):
        return tuple(slice(0, size) for size in tensor.shape)
    slices = [(0, size) for size in tensor.shape]
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate() if place is None else place
    assert coordinate is not None, "this rank is not part of the tensor's mesh"

    # A stable sort keeps the order of plain shards, and moves strided shards to the end.
    placements = list(enumerate(tensor.placements))
    strided_last = sorted(placements, key=lambda item: type(item[1]).__name__ == "_StridedShard")
    for axis, placement in strided_last:
        dim = sharded_dim(placement)
        if dim is None:
            continue
        # Like torch.chunk, round up the size of the parts. The last ranks may have smaller or empty parts.
        start, stop = slices[dim]
        chunk = -(-(stop - start) // mesh.size(axis))
        first = min(start + chunk * coordinate[axis], stop)
        slices[dim] = (first, min(first + chunk, stop))
    return tuple(slice(start, stop) for start, stop in slices)


def to_full(tensor: Tensor) -> Tensor:
    """Return the full tensor on every rank, for tests, export and verify.

    A collective if the tensor is distributed.
    """
    if not is_distributed(tensor):
        return tensor
    # Parameters sharded by FSDP and tensor parallelism require two gathers. Silence PyTorch's warning
    # about their speed. Set the level only once, because setting it clears the caches of all loggers.
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    if logger.level != logging.ERROR:
        logger.setLevel(logging.ERROR)
    return tensor.full_tensor()


NORM_CHUNK_NUMEL = 1 << 16
"""Elements per chunk on a CPU: 512 KiB in float64, which fit into the L2 cache of a core."""


def squared_norm(tensors: list[Tensor]) -> Tensor:
    """Return the sum of squares of at least one local tensor, a float64 scalar on their device.

    On a CPU, squares are added in float64, in chunks without a copy of a tensor. PyTorch's norm
    adds float32 squares in a few long chains: its error is 4e-6 for half a million elements and
    5e-3 for 67 million, and depends on how a tensor is split. Accelerators add in a tree, with an
    error within 1e-6 in float32. Only the sum over tensors is in float64.
    """
    device = tensors[0].device
    if device.type != "cpu":
        norms = torch.stack(torch._foreach_norm(tensors, 2.0, dtype=torch.float32))
        return norms.to(sum_dtype(device)).square().sum()
    # Convert each chunk by copying it to a float64 buffer. The dot product squares and adds.
    total = torch.zeros((), dtype=torch.float64)
    largest = max(tensor.numel() for tensor in tensors)
    buffer = torch.empty(min(NORM_CHUNK_NUMEL, largest), dtype=torch.float64)
    for tensor in tensors:
        for chunk in tensor.detach().reshape(-1).split(NORM_CHUNK_NUMEL):
            wide = buffer[: chunk.numel()].copy_(chunk)
            total += torch.dot(wide, wide)
    return total
