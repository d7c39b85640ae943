"""Matrices that are split over ranks, each whole on one rank for a moment.

For updates that need a matrix as a whole. Each matrix has one owner among the ranks that hold its parts. Parts travel
to the owners along one mesh axis after the other, with one all-to-all per axis for many matrices, and the parts of the
results travel back the same way; so no process group is needed beside those of the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardtrain.ops.dtensor import local_slices, sharded_dim, split_axes

Key = tuple[int, tuple[int, ...]]
"""A part in flight: its matrix, and where it comes from: a rank's coordinate along the axes that split matrices."""
LOCAL_ELEMENTS = 2**26
"""Elements per rank that are in flight at once. Much larger models exchange in several rounds, to bound the memory."""


@dataclass(frozen=True)
class _Matrix:
    tensor: int  # its place in the bucket's list
    index: int | None  # its place in this rank's part of a stack
    shape: tuple[int, int]
    owner: tuple[int, ...]


@dataclass(frozen=True)
class _Hop:
    """One all-to-all: the parts that go to, and come from, each rank along an axis."""

    axis: int
    sent: list[list[Key]]
    received: list[list[Key]]


class Bucket:
    """Matrices, or stacks of them, of one device mesh that are split over the same axes and travel together."""

    def __init__(self, tensors: Sequence[Tensor], load: list[int]) -> None:
        """Plan the journeys. ``load`` is the work per rank so far, to which that of this bucket is added."""
        self.tensors = list(tensors)
        self._axes = matrix_axes(self.tensors[0])
        first = self.tensors[0]
        self._mesh = first.device_mesh if isinstance(first, DTensor) else None
        self._place = [self._mesh.get_local_rank(i) for i in range(self._mesh.ndim)] if self._mesh is not None else []
        self._sizes = tuple(self._mesh.size(axis) for axis in self._axes) if self._mesh is not None else ()
        self._here = tuple(self._place[axis] for axis in self._axes)
        # everything is planned once: the same matrices travel the same way in every step
        self._matrices = self._assign(load)
        self._hops = [self._hop(k) for k in range(len(self._axes))]
        keys = [(m, self._here) for m in range(len(self._matrices))]
        keys += [key for hop in self._hops for side in (hop.sent, hop.received) for keys_ in side for key in keys_]
        self._slices = {key: self._slices_of(key) for key in keys}

    def map(self, parts: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Apply a function to each whole matrix, given and giving the parts that this rank holds (a collective).

        ``parts`` has this rank's part of each of ``tensors``, all of one type and device, with 2 dimensions or, for
        stacks, 3. The function sees a matrix (rows, columns) and gives one of the same shape and type.
        """
        held = {(m, self._here): _matrix_of(parts, matrix) for m, matrix in enumerate(self._matrices)}
        for hop in self._hops:
            held = self._exchange(hop.axis, held, hop.sent, hop.received, parts[0])
        # each matrix is whole on its owner now, and the others wait in the all-to-all that comes next
        owned = [m for m, matrix in enumerate(self._matrices) if matrix.owner == self._here]
        held = {key: part for m in owned for key, part in self._apply(m, held, function)}
        for hop in reversed(self._hops):
            held = self._exchange(hop.axis, held, hop.received, hop.sent, parts[0])
        results = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in parts]
        for m, matrix in enumerate(self._matrices):
            _matrix_of(results, matrix).copy_(held[m, self._here])
        return results

    def _apply(
        self, m: int, held: dict[Key, Tensor], function: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[Key, Tensor]]:
        origins = list(product(*(range(size) for size in self._sizes)))
        some = held[m, origins[0]]
        whole = some.new_empty(self._matrices[m].shape)
        for origin in origins:
            whole[self._slices[m, origin]] = held.pop((m, origin))
        result = function(whole)
        for origin in origins:
            yield (m, origin), result[self._slices[m, origin]]

    def _exchange(
        self, axis: int, held: dict[Key, Tensor], sent: list[list[Key]], received: list[list[Key]], like: Tensor
    ) -> dict[Key, Tensor]:
        assert self._mesh is not None
        outgoing = [held[key].reshape(-1) for keys in sent for key in keys]
        buffer = torch.cat(outgoing) if outgoing else like.new_empty(0)
        slices = {key: self._slices[key] for keys in (*sent, *received) for key in keys}
        shapes = {
            key: (rows.stop - rows.start, columns.stop - columns.start) for key, (rows, columns) in slices.items()
        }
        counts = [[sum(_numel(shapes[key]) for key in keys) for keys in side] for side in (sent, received)]
        # one flat buffer per direction: every part one behind the other, in an order that both sides know
        arrived = like.new_empty(sum(counts[1]))
        dist.all_to_all_single(arrived, buffer, counts[1], counts[0], group=self._mesh.get_group(axis))
        keys = [key for keys in received for key in keys]
        pieces = arrived.split([_numel(shapes[key]) for key in keys]) if keys else ()
        return {key: piece.view(shapes[key]) for key, piece in zip(keys, pieces, strict=True)}

    def _assign(self, load: list[int]) -> list[_Matrix]:
        """Give each matrix to the rank with the least work so far, the most work first; alike on all its ranks."""
        found: list[tuple[int, int | None, tuple[int, int]]] = []
        for t, tensor in enumerate(self.tensors):
            rows, columns = tensor.shape[-2:]
            stack = local_slices(tensor)[0] if tensor.ndim == 3 else None
            indices = [None] if stack is None else range(stack.stop - stack.start)
            found += [(t, index, (rows, columns)) for index in indices]
        owners = list(product(*(range(size) for size in self._sizes)))
        matrices = []
        # the heaviest first, each to the rank with the least work: an old rule that is never worse than 4/3 of the
        # best
        for t, index, shape in sorted(found, key=lambda item: -_work(item[2])):
            least = load.index(min(load))
            load[least] += _work(shape)
            matrices.append(_Matrix(t, index, shape, owners[least]))
        return matrices

    def _hop(self, k: int) -> _Hop:
        """The k-th all-to-all: before it, this rank holds what it owns along the axes before k, of all ranks there."""
        place = self._here
        size = self._sizes[k]
        mine = [m for m, matrix in enumerate(self._matrices) if matrix.owner[:k] == place[:k]]
        before = list(product(*(range(n) for n in self._sizes[:k])))
        sent: list[list[Key]] = [[] for _ in range(size)]
        received: list[list[Key]] = [[] for _ in range(size)]
        for m in mine:
            owner = self._matrices[m].owner[k]
            for origin in before:
                sent[owner].append((m, (*origin, *place[k:])))
                if owner == place[k]:
                    for sender in range(size):
                        received[sender].append((m, (*origin, sender, *place[k + 1 :])))
        return _Hop(self._axes[k], sent, received)

    def _slices_of(self, key: Key) -> tuple[slice, slice]:
        m, origin = key
        place = list(self._place)
        for axis, coordinate in zip(self._axes, origin, strict=True):
            place[axis] = coordinate
        rows, columns = local_slices(self.tensors[self._matrices[m].tensor], place)[-2:]
        return rows, columns


def matrix_axes(tensor: Tensor) -> tuple[int, ...]:
    """Axes of the tensor's mesh that split its last two dimensions; those that split a stack leave matrices whole."""
    if not isinstance(tensor, DTensor):
        return ()
    dims = {axis: sharded_dim(tensor.placements[axis]) for axis in split_axes(tensor)}
    return tuple(axis for axis, dim in dims.items() if dim is not None and dim >= tensor.ndim - 2)


def plan(tensors: Sequence[Tensor], local_elements: int = LOCAL_ELEMENTS) -> list[Bucket]:
    """Sort matrices and stacks of matrices of one device mesh into buckets; equal on all ranks that share a matrix."""
    by_axes: dict[tuple[int, ...], list[Tensor]] = {}
    for tensor in tensors:
        by_axes.setdefault(matrix_axes(tensor), []).append(tensor)
    buckets = []
    for axes, members in by_axes.items():
        num_ranks = 1
        for axis in axes:
            assert isinstance(members[0], DTensor)
            num_ranks *= members[0].device_mesh.size(axis)
        load = [0] * num_ranks
        waiting: list[Tensor] = []
        elements = 0
        for tensor in members:
            # a bucket is in flight at once, so its size bounds the memory
            if waiting and elements + tensor.numel() > local_elements * num_ranks:
                buckets.append(Bucket(waiting, load))
                waiting = []
                elements = 0
            waiting.append(tensor)
            elements += tensor.numel()
        buckets.append(Bucket(waiting, load))
    return buckets


def _matrix_of(parts: Sequence[Tensor], matrix: _Matrix) -> Tensor:
    part = parts[matrix.tensor]
    return part if matrix.index is None else part[matrix.index]


def _numel(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1]


def _work(shape: tuple[int, int]) -> int:
    # a product with the Gram matrix of the smaller side
    return shape[0] * shape[1] * min(shape)
