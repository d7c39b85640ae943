"""Local slices of DTensors: they match DTensor's placement and cover the tensor, for even and uneven sizes."""

from __future__ import annotations

import math

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardtrain.ops.dtensor import (
    local_slices,
    local_tensor,
    sharded_dim,
    split_axes,
    squared_norm,
    to_full,
)


def test_plain_tensor_is_one_full_slice() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    assert local_tensor(tensor) is tensor
    assert to_full(tensor) is tensor
    assert split_axes(tensor) == ()
    assert local_slices(tensor) == (slice(0, 2), slice(0, 3))


def test_only_shards_split_a_dimension() -> None:
    assert sharded_dim(Shard(1)) == 1
    assert sharded_dim(Replicate()) is None
    assert sharded_dim(Partial()) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squared_norm_covers_all_tensors(dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), (0, 2), (100, 7)]
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    expected = sum(tensor.double().square().sum() for tensor in tensors)
    result = squared_norm(tensors)

    assert result.dtype == torch.float64
    assert result.shape == ()
    assert result.item() == pytest.approx(expected.item(), rel=1e-12)  # float64 sums


def test_squared_norm_of_large_bfloat16_values_is_finite() -> None:
    tensor = torch.full((1000,), 1e15, dtype=torch.bfloat16)
    # bfloat16 has eight significant bits, so 1e15 is stored with an error of up to 0.4%
    assert squared_norm([tensor]).item() == pytest.approx(1e33, rel=1e-2)


def _check_dtensors(rank: int) -> None:
    line = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    for shape in ((61, 7), (8, 8), (2, 3), (1, 1), (5,)):
        full = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)

        cases = []
        for dim in range(len(shape)):
            cases.append((line, (Shard(dim),)))
            cases.append((grid, (Shard(dim), Shard(0))))
            cases.append((grid, (Replicate(), Shard(0))))
            cases.append((flat, (Shard(0), Shard(dim))))
        for mesh, placements in cases:
            case = (shape, mesh, placements)
            tensor = distribute_tensor(full, mesh, placements)
            assert torch.equal(full[local_slices(tensor)], local_tensor(tensor)), case
            assert torch.equal(to_full(tensor), full)

            # A mesh axis of one rank does not split a tensor.
            expected_axes = []
            for axis, placement in enumerate(placements):
                if isinstance(placement, Shard) and mesh.size(axis) > 1:
                    expected_axes.append(axis)
            assert split_axes(tensor) == tuple(expected_axes)
    _check_fsdp_over_tp(grid)


def _check_fsdp_over_tp(grid) -> None:
    for style, sizes in (
        (ColwiseParallel(), (7, 61)),
        (RowwiseParallel(), (61, 7)),
        (ColwiseParallel(), (4, 8)),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(*sizes, bias=False))
        full = model[0].weight.detach().clone()
        parallelize_module(model, grid["tp"], {"0": style})
        fully_shard(model, mesh=grid["dp"])
        weight = model[0].weight
        assert torch.equal(full[local_slices(weight)], local_tensor(weight)), (
            style,
            sizes,
            weight.placements,
        )
        assert split_axes(weight) == (0, 1)
        if sizes == (4, 8):  # PyTorch can gather even shards
            assert torch.equal(to_full(weight).detach(), full)


def test_slices_match_the_placement_of_dtensor() -> None:
    run_ranks(4, _check_dtensors)
