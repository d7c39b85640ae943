"""Sums over the ranks that share a matrix, for optimizers that need products or norms of unsharded matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain.ops.dtensor import is_distributed, sharded_dim, split_axes


def sum_over_shards(
    values: Sequence[Tensor], tensors: Sequence[Tensor], dims: Sequence[int]
) -> None:
    """Add up local values over the ranks that share a tensor, in place (a collective).

    Args:
        values: A contiguous plain tensor for each of ``tensors``, all of one dtype and device.
        tensors: Tensors on one device mesh, or plain tensors, whose values are complete.
        dims: Negative dimensions. Values are added over the mesh axes that shard one of them.
    """
    by_axis: dict[int, list[Tensor]] = {}
    mesh = None
    for value, tensor in zip(values, tensors, strict=True):
        if not is_distributed(tensor):
            continue
        mesh = tensor.device_mesh
        for axis in split_axes(tensor):
            dim = sharded_dim(tensor.placements[axis])
            if dim is not None and dim - tensor.ndim in dims:
                by_axis.setdefault(axis, []).append(value)
    # one collective per axis, in the same order on all ranks
    for axis in sorted(by_axis):
        assert mesh is not None
        members = by_axis[axis]
        buffer = torch.cat([value.flatten() for value in members])
        dist.all_reduce(buffer, group=mesh.get_group(axis))
        pieces = buffer.split([value.numel() for value in members])
        for value, piece in zip(members, pieces, strict=True):
            value.copy_(piece.view_as(value))
