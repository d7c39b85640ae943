"""Gathering of sharded matrices: one rank of each group gets the full matrix once, with few collectives."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from shardtrain.ops.dtensor import local_slices, local_tensor
from shardtrain.optim.gather_matrices import matrix_axes, plan


def function_of_full_matrix(matrix):
    """Return a result that shows whether all elements are present and in place."""
    return matrix.flip(0, 1) + matrix[0, 0] + matrix[-1, -1]


def matrices(num):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn((7, 5) if i % 2 else (5, 7), generator=generator) for i in range(num)]


def _map(rank, mesh_shape, placements, tensors, local_elements):
    """Apply the function to all matrices. Return the numbers of its calls, of collectives and of buckets."""
    mesh = init_device_mesh("cpu", mesh_shape)
    placed = [distribute_tensor(tensor, mesh, placements) for tensor in tensors]
    calls = []

    def function(matrix):
        calls.append(matrix.shape)
        return function_of_full_matrix(matrix)

    buckets = plan(placed, local_elements)
    order = []
    results = []
    with CommDebugMode() as mode:
        for bucket in buckets:
            order += bucket.tensors
            shards = [local_tensor(tensor) for tensor in bucket.tensors]
            results += bucket.map(shards, function)
    collectives = sum(mode.get_comm_counts().values())

    assert [id(tensor) for tensor in order] == [id(tensor) for tensor in placed]
    for full, tensor, result in zip(tensors, placed, results, strict=True):
        if full.ndim == 2:
            expected = function_of_full_matrix(full)
        else:  # a stack of matrices
            expected = torch.stack([function_of_full_matrix(matrix) for matrix in full])
        assert torch.equal(result, expected[local_slices(tensor)])
        assert result.is_contiguous()
    return len(calls), collectives, len(buckets)


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((4,), [Shard(0)]),
        ((4,), [Shard(1)]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((2, 2), [Shard(1), Shard(1)]),
    ],
)
def test_ranks_divide_the_work_in_two_collectives_per_axis(mesh_shape, placements):
    results = run_ranks(4, _map, mesh_shape, placements, matrices(8), 2**26)
    assert [calls for calls, _, _ in results] == [2, 2, 2, 2]
    assert {(collectives, buckets) for _, collectives, buckets in results} == {
        (2 * len(mesh_shape), 1)
    }


def test_replicas_do_the_same_work():
    results = run_ranks(4, _map, (2, 2), [Replicate(), Shard(0)], matrices(4), 2**26)
    assert [(calls, collectives) for calls, collectives, _ in results] == [(2, 2)] * 4


def test_some_ranks_have_no_work_with_fewer_matrices_than_ranks():
    results = run_ranks(4, _map, (4,), [Shard(0)], matrices(1), 2**26)
    assert sorted(calls for calls, _, _ in results) == [0, 0, 0, 1]


def test_memory_limit_splits_the_work_into_rounds_with_equal_results():
    results = run_ranks(2, _map, (2,), [Shard(0)], matrices(6), 50)
    assert {buckets for _, _, buckets in results} == {3}
    assert [calls for calls, _, _ in results] == [3, 3]


def test_stack_split_between_matrices_needs_no_collective():
    stacks = [torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(1))]
    results = run_ranks(4, _map, (4,), [Shard(0)], stacks, 2**26)
    assert [(calls, collectives) for calls, collectives, _ in results] == [
        (2, 0),
        (2, 0),
        (1, 0),
        (0, 0),
    ]

    results = run_ranks(4, _map, (2, 2), [Shard(0), Shard(2)], stacks, 2**26)
    assert sum(calls for calls, _, _ in results) == 5
    assert {c for _, c, _ in results} == {2}


def test_plain_matrix_needs_no_gather():
    tensor = torch.randn(3, 2)
    assert matrix_axes(tensor) == ()
    [bucket] = plan([tensor])
    assert torch.equal(
        bucket.map([tensor], function_of_full_matrix)[0], function_of_full_matrix(tensor)
    )
    assert plan([]) == []
