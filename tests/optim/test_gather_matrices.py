"""Laws of whole matrices: each is seen whole by one rank that shares it, once, in few collectives."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from shardtrain.ops.dtensor import local_slices, local_tensor
from shardtrain.optim.gather_matrices import matrix_axes, plan


def whole_function(matrix):
    """Something that needs every element of a matrix, in its place."""
    return matrix.flip(0, 1) + matrix[0, 0] + matrix[-1, -1]


def matrices(num):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn((7, 5) if i % 2 else (5, 7), generator=generator) for i in range(num)]


def _map(rank, mesh_shape, placements, tensors, local_elements):
    mesh = init_device_mesh("cpu", mesh_shape)
    placed = [distribute_tensor(tensor, mesh, placements) for tensor in tensors]
    calls = []

    def function(matrix):
        calls.append(matrix.shape)
        return whole_function(matrix)

    buckets = plan(placed, local_elements)
    with CommDebugMode() as mode:
        results = [
            part for bucket in buckets for part in bucket.map([local_tensor(t) for t in bucket.tensors], function)
        ]
    collectives = sum(mode.get_comm_counts().values())
    order = [tensor for bucket in buckets for tensor in bucket.tensors]
    assert [id(tensor) for tensor in order] == [id(tensor) for tensor in placed]
    for whole, tensor, result in zip(tensors, placed, results, strict=True):
        each = whole_function(whole) if whole.ndim == 2 else torch.stack([whole_function(m) for m in whole])
        assert torch.equal(result, each[local_slices(tensor)]) and result.is_contiguous()
    return len(calls), collectives, len(buckets)


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [((4,), [Shard(0)]), ((4,), [Shard(1)]), ((2, 2), [Shard(0), Shard(1)]), ((2, 2), [Shard(1), Shard(1)])],
)
def test_ranks_that_share_matrices_divide_the_work_in_two_collectives_per_axis(mesh_shape, placements):
    results = run_ranks(4, _map, mesh_shape, placements, matrices(8), 2**26)
    assert [calls for calls, _, _ in results] == [2, 2, 2, 2]
    assert {(collectives, buckets) for _, collectives, buckets in results} == {(2 * len(mesh_shape), 1)}


def test_copies_of_the_ranks_do_the_same_work():
    results = run_ranks(4, _map, (2, 2), [Replicate(), Shard(0)], matrices(4), 2**26)
    assert [(calls, collectives) for calls, collectives, _ in results] == [(2, 2)] * 4


def test_fewer_matrices_than_ranks_leave_some_without_work():
    results = run_ranks(4, _map, (4,), [Shard(0)], matrices(1), 2**26)
    assert sorted(calls for calls, _, _ in results) == [0, 0, 0, 1]


def test_a_bound_on_memory_makes_more_rounds_of_the_same_results():
    results = run_ranks(2, _map, (2,), [Shard(0)], matrices(6), 50)
    assert {buckets for _, _, buckets in results} == {3}
    assert [calls for calls, _, _ in results] == [3, 3]


def test_a_stack_that_is_split_between_matrices_needs_no_collective():
    stacks = [torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(1))]
    results = run_ranks(4, _map, (4,), [Shard(0)], stacks, 2**26)
    assert [(calls, collectives) for calls, collectives, _ in results] == [(2, 0), (2, 0), (1, 0), (0, 0)]
    results = run_ranks(4, _map, (2, 2), [Shard(0), Shard(2)], stacks, 2**26)
    assert sum(calls for calls, _, _ in results) == 5 and {c for _, c, _ in results} == {2}


def test_a_plain_matrix_has_no_axes_and_is_whole():
    tensor = torch.randn(3, 2)
    assert matrix_axes(tensor) == ()
    [bucket] = plan([tensor])
    assert torch.equal(bucket.map([tensor], whole_function)[0], whole_function(tensor))
    assert plan([]) == []
