"""Gather sharded matrices for updates that need the unsharded matrix, each temporarily on one rank.

Each matrix is assigned to one owner among the ranks that have its shards. Shards are sent to the owners
along one mesh axis after the other, with one all-to-all per axis for many matrices. The shards of the
results return the same way. So the mesh's own process groups are sufficient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardtrain.ops.dtensor import local_slices, sharded_dim, split_axes

Key = tuple[int, tuple[int, ...]]
"""Key of a shard: the index of its matrix, and the coordinate of its original rank along the axes that
shard matrices."""
LOCAL_ELEMENTS = 2**26
"""Maximum elements per rank in one exchange.

Larger models exchange in several rounds, to bound the memory.
"""


@dataclass(frozen=True)
class _Matrix:
    tensor: int
    """Index of its tensor in the bucket."""
    index: int | None
    """Index in this rank's shard of a stack; None for a tensor of two dims."""
    shape: tuple[int, int]
    owner: tuple[int, ...]
    """Coordinate of the owner along the axes that shard matrices."""


@dataclass(frozen=True)
class _Hop:
    """One all-to-all: the shards sent to, and received from, each rank along an axis."""

    axis: int
    sent: list[list[Key]]
    received: list[list[Key]]


class Bucket:
    """Matrices or stacks of matrices on one device mesh that are sharded over the same axes and exchanged
    together."""

    def __init__(self, tensors: Sequence[Tensor], load: list[int]) -> None:
        """Assign each matrix to the least loaded rank.

        ``load`` is the work per rank and is updated in place.
        """
        self.tensors = list(tensors)
        self._axes = matrix_axes(self.tensors[0])
        self._mesh = None
        self._coordinate: list[int] = []
        """This rank's coordinate along all axes of the mesh."""
        self._sizes: tuple[int, ...] = ()
        """Ranks along the axes that shard matrices."""
        first = self.tensors[0]
        if isinstance(first, DTensor):
            mesh = first.device_mesh
            self._mesh = mesh
            self._coordinate = [mesh.get_local_rank(axis) for axis in range(mesh.ndim)]
            self._sizes = tuple(mesh.size(axis) for axis in self._axes)
        self._position = tuple(self._coordinate[axis] for axis in self._axes)
        # the plan is the same in every step
        self._matrices = self._assign(load)
        self._hops: list[_Hop] = []
        for k in range(len(self._axes)):
            self._hops.append(self._plan_hop(k))

        # the slices of all shards that this rank holds at any point of the exchange
        keys: set[Key] = set()
        for m in range(len(self._matrices)):
            keys.add((m, self._position))
        for hop in self._hops:
            for keys_of_rank in hop.sent:
                keys.update(keys_of_rank)
            for keys_of_rank in hop.received:
                keys.update(keys_of_rank)
        self._slices = {key: self._slices_of(key) for key in keys}

    def map(self, parts: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Apply a function to each unsharded matrix. Return this rank's shards of the results (a
        collective).

        ``parts`` has this rank's shard of each of ``tensors``, all of one dtype and device, with 2 dims or,
        for stacks,
        3. The function maps a matrix (rows, columns) to one of the same shape and dtype.
        """
        shards: dict[Key, Tensor] = {}
        for m, matrix in enumerate(self._matrices):
            shards[m, self._position] = _matrix_of(parts, matrix)
        for hop in self._hops:
            shards = self._exchange(hop.axis, shards, hop.sent, hop.received, parts[0])

        # Now each owner has all shards of its matrices. Ranks that own none wait in the next all-to-all.
        results_of_owner: dict[Key, Tensor] = {}
        for m, matrix in enumerate(self._matrices):
            if matrix.owner == self._position:
                shards_of_result = self._apply(m, shards, function)
                results_of_owner.update(shards_of_result)

        # The shards return on the same way, so each rank now sends what it received.
        shards = results_of_owner
        for hop in reversed(self._hops):
            shards = self._exchange(hop.axis, shards, hop.received, hop.sent, parts[0])

        results = []
        for part in parts:
            results.append(torch.empty_like(part, memory_format=torch.contiguous_format))
        for m, matrix in enumerate(self._matrices):
            result = _matrix_of(results, matrix)
            result.copy_(shards[m, self._position])
        return results

    def _apply(
        self, m: int, shards: dict[Key, Tensor], function: Callable[[Tensor], Tensor]
    ) -> dict[Key, Tensor]:
        """Assemble a matrix from its shards, apply the function, and return the shards of the result."""
        origins = _coordinates(self._sizes)
        first_shard = shards[m, origins[0]]
        matrix = first_shard.new_empty(self._matrices[m].shape)
        for origin in origins:
            rows, columns = self._slices[m, origin]
            # pop frees the shard
            matrix[rows, columns] = shards.pop((m, origin))

        result = function(matrix)
        shards_of_result = {}
        for origin in origins:
            rows, columns = self._slices[m, origin]
            shards_of_result[m, origin] = result[rows, columns]
        return shards_of_result

    def _exchange(
        self,
        axis: int,
        shards: dict[Key, Tensor],
        sent: list[list[Key]],
        received: list[list[Key]],
        like: Tensor,
    ) -> dict[Key, Tensor]:
        """Run one all-to-all, and return the received shards.

        ``like`` has the dtype and device of the buffers.
        """
        assert self._mesh is not None
        # one flat buffer per direction, with shards in an order that both sides know
        outgoing: list[Tensor] = []
        send_counts = []
        for keys in sent:
            outgoing.extend(shards[key].reshape(-1) for key in keys)
            send_counts.append(self._total_numel(keys))
        send_buffer = torch.cat(outgoing) if outgoing else like.new_empty(0)

        received_keys = []
        receive_counts = []
        for keys in received:
            received_keys.extend(keys)
            receive_counts.append(self._total_numel(keys))
        receive_buffer = like.new_empty(sum(receive_counts))

        group = self._mesh.get_group(axis)
        dist.all_to_all_single(
            receive_buffer, send_buffer, receive_counts, send_counts, group=group
        )
        if not received_keys:
            return {}
        pieces = receive_buffer.split([self._numel(key) for key in received_keys])
        received_shards = {}
        for key, piece in zip(received_keys, pieces, strict=True):
            received_shards[key] = piece.view(self._shape(key))
        return received_shards

    def _assign(self, load: list[int]) -> list[_Matrix]:
        """Assign each matrix to the rank with the least work, largest matrix first.

        The result is the same on all ranks that share these matrices.
        """
        unassigned: list[tuple[int, int | None, tuple[int, int]]] = []
        for t, tensor in enumerate(self.tensors):
            rows, columns = tensor.shape[-2:]
            shape = (rows, columns)
            if tensor.ndim != 3:
                unassigned.append((t, None, shape))
                continue
            # only the part of a stack that this rank holds
            stack = local_slices(tensor)[0]
            for place in range(stack.stop - stack.start):
                unassigned.append((t, place, shape))

        # longest processing time first: the largest load is at most 4/3 of the optimum (Graham 1969)
        unassigned.sort(key=lambda item: _work(item[2]), reverse=True)
        owners = _coordinates(self._sizes)
        matrices = []
        for t, index, shape in unassigned:
            least = load.index(min(load))
            load[least] += _work(shape)
            matrix = _Matrix(t, index, shape, owner=owners[least])
            matrices.append(matrix)
        return matrices

    def _plan_hop(self, k: int) -> _Hop:
        """Plan the all-to-all along axis k.

        Before this hop, a rank holds shards of the matrices whose owner has the same coordinates as this
        rank on the axes before k. The shards come from all ranks along those axes.
        """
        before_k = self._position[:k]
        own_coordinate = self._position[k]
        after_k = self._position[k + 1 :]
        size = self._sizes[k]
        origins_before_k = _coordinates(self._sizes[:k])
        sent: list[list[Key]] = [[] for _ in range(size)]
        received: list[list[Key]] = [[] for _ in range(size)]
        for m, matrix in enumerate(self._matrices):
            if matrix.owner[:k] != before_k:
                continue
            owner = matrix.owner[k]
            for origin in origins_before_k:
                key = (m, (*origin, own_coordinate, *after_k))
                sent[owner].append(key)
                if owner != own_coordinate:
                    continue
                for sender in range(size):
                    key = (m, (*origin, sender, *after_k))
                    received[sender].append(key)
        return _Hop(self._axes[k], sent, received)

    def _slices_of(self, key: Key) -> tuple[slice, slice]:
        """Return the rows and columns of a shard in its matrix."""
        m, origin = key
        coordinate = list(self._coordinate)
        for axis, position in zip(self._axes, origin, strict=True):
            coordinate[axis] = position
        tensor = self.tensors[self._matrices[m].tensor]
        rows, columns = local_slices(tensor, coordinate)[-2:]
        return rows, columns

    def _shape(self, key: Key) -> tuple[int, int]:
        rows, columns = self._slices[key]
        return rows.stop - rows.start, columns.stop - columns.start

    def _numel(self, key: Key) -> int:
        rows, columns = self._shape(key)
        return rows * columns

    def _total_numel(self, keys: list[Key]) -> int:
        return sum(self._numel(key) for key in keys)


def matrix_axes(tensor: Tensor) -> tuple[int, ...]:
    """Return the axes of the tensor's mesh that shard its last two dims.

    Axes that shard a stack do not split matrices.
    """
    if not isinstance(tensor, DTensor):
        return ()
    axes = []
    for axis in split_axes(tensor):
        dim = sharded_dim(tensor.placements[axis])
        if dim is not None and dim >= tensor.ndim - 2:
            axes.append(axis)
    return tuple(axes)


def plan(tensors: Sequence[Tensor], local_elements: int = LOCAL_ELEMENTS) -> list[Bucket]:
    """Sort matrices and stacks of matrices of one device mesh into buckets.

    Equal on all ranks that share a matrix.
    """
    by_axes: dict[tuple[int, ...], list[Tensor]] = {}
    for tensor in tensors:
        axes = matrix_axes(tensor)
        by_axes.setdefault(axes, []).append(tensor)
    buckets = []
    for axes, members in by_axes.items():
        num_ranks = 1
        for axis in axes:
            assert isinstance(members[0], DTensor)
            num_ranks *= members[0].device_mesh.size(axis)
        # one bucket is exchanged at a time, so its size bounds the memory
        elements_per_bucket = local_elements * num_ranks
        load = [0] * num_ranks
        waiting: list[Tensor] = []
        elements = 0
        for tensor in members:
            if waiting and elements + tensor.numel() > elements_per_bucket:
                buckets.append(Bucket(waiting, load))
                waiting = []
                elements = 0
            waiting.append(tensor)
            elements += tensor.numel()
        buckets.append(Bucket(waiting, load))
    return buckets


def _coordinates(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the coordinates of all ranks along axes of these sizes, the last axis fastest."""
    return list(product(*(range(size) for size in sizes)))


def _matrix_of(parts: Sequence[Tensor], matrix: _Matrix) -> Tensor:
    """Return the tensor, or the entry of a stack, that a matrix is."""
    part = parts[matrix.tensor]
    if matrix.index is None:
        return part
    return part[matrix.index]


def _work(shape: tuple[int, int]) -> int:
    # FLOPs of a product with the Gram matrix of the smaller side, up to a factor
    return shape[0] * shape[1] * min(shape)
