"""Compute which ranks hold which shard of each tensor, with little communication.

The location of a rank's shard follows from the tensor's shape and the rank's number. The
coordinates of a rank in the mesh are digits of its number, and each sharded axis splits one
dimension. A rank describes these splits once for all tensors of a kind. Equal descriptions are
exchanged once, so there is one text per pipeline stage for any number of ranks. A shard that such
splits cannot describe is sent as an explicit box.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from shardtrain.checkpoint.collectives import gather_distinct_json
from shardtrain.checkpoint.resharding import Box, Ints
from shardtrain.facts.dtypes import ITEM_BYTES
from shardtrain.ops.dtensor import is_distributed, local_slices, local_tensor, sharded_dim
from shardtrain.utils.errors import CheckpointError

_LAYER = re.compile(r"(.*?\.)(0|[1-9]\d*)(\..*)")
"""A name that contains a layer number. A number with leading zeros, such as 007, is part of the name."""
Table = Mapping[str, list[Any]]
"""A rank's description of its tensors: name -> [dtype, shape, splits or box of its shard]."""


@dataclass(frozen=True, eq=False)
class HeldBoxes:
    """Boxes of one tensor with an equal number of holders, ordered by their offsets.

    Attributes:
        offsets: (n, dims)
        sizes: (n, dims). No box is empty.
        ranks: (n, holders), ascending in each row.
        is_even: All boxes have the same size, and each rank that has the tensor holds one of them.
    """

    offsets: Ints
    sizes: Ints
    ranks: Ints
    is_even: bool

    @property
    def holders(self) -> int:
        """Number of ranks that hold each box."""
        return int(self.ranks.shape[1])

    @cached_property
    def numels(self) -> Ints:
        """Number of elements of each box, (n,)."""
        return self.sizes.prod(1, dtype=np.int64)

    def row_of(self, rank: int) -> int | None:
        """Return the index of the box that a rank holds, or None."""
        is_holder = (self.ranks == rank).any(1)
        rows = is_holder.nonzero()[0]
        if not len(rows):
            return None
        return int(rows[0])


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor and the holders of its boxes."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[HeldBoxes, ...]


def table_of(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Describe this rank's tensors.

    Raises:
        CheckpointError: the sharding of a tensor is not supported.
    """
    digits: dict[int, list[tuple[int, int] | None]] = {}
    rules: dict[Any, Any] = {}  # one entry per kind, because layers have equal tensors
    table = {}
    for name, tensor in tensors.items():
        kind = _kind(tensor)
        if kind not in rules:
            rules[kind] = _rule(tensor, digits)
        dtype = str(tensor.dtype).removeprefix("torch.")
        table[name] = [dtype, list(tensor.shape), rules[kind]]
    return table


def find_holders(tensors: Mapping[str, Tensor]) -> dict[str, Held]:
    """Return the holders of all ranks' tensors (a collective). The result is equal on all ranks.

    Raises:
        CheckpointError: on all ranks, if two ranks have tensors of the same name with different
            dtypes or shapes.
    """
    tables, table_of_rank = tables_of_ranks(table_of(tensors))
    return held_by_all(tables, table_of_rank)


def tables_of_ranks(table: Table) -> tuple[list[Table], list[int]]:
    """Return the distinct tables of all ranks, and the index of each rank's table (a collective).

    ``table`` is that of this rank.
    """
    # Fold the tables, because a model of a hundred layers would send each line a hundred times.
    distinct, index_of_rank = gather_distinct_json(fold(table))
    tables: list[Table] = [unfold(folded) for folded in distinct]
    return tables, index_of_rank


def fold(table: Table) -> list[list[Any]]:
    """Compress a table: entries that only differ in their layer number become one line.

    >>> fold({"layers.0.w": ["float32", [2], []], "layers.1.w": ["float32", [2], []], "head": ["float32", [3], []]})
    [['layers.', '.w', ['float32', [2], []], [[0, 2]]], ['head', '', ['float32', [3], []], []]]
    """
    lines: dict[tuple[str, str, str], list[Any]] = {}
    for name, value in table.items():
        before = name
        number = ""
        after = ""
        match = _LAYER.fullmatch(name)
        if match:
            before, number, after = match.groups()
        key = (before, after, repr(value))
        line = lines.setdefault(key, [before, after, value, []])
        if not number:
            continue
        # A run of consecutive layer numbers is [first, stop].
        layer = int(number)
        runs = line[3]
        if runs and runs[-1][1] == layer:
            runs[-1][1] += 1
        else:
            runs.append([layer, layer + 1])
    return list(lines.values())


def unfold(lines: Sequence[Sequence[Any]]) -> dict[str, list[Any]]:
    """Return the table that ``fold`` compressed. The order of its names may differ."""
    table = {}
    for before, after, value, runs in lines:
        if not runs:
            table[before] = value
        for start, stop in runs:
            for number in range(start, stop):
                table[f"{before}{number}{after}"] = value
    return table


def held_by_all(tables: Sequence[Table], table_of_rank: Sequence[int]) -> dict[str, Held]:
    """Return the holders if rank r has the table ``tables[table_of_rank[r]]``. Needs no process group.

    Raises:
        CheckpointError: as ``find_holders``.
    """
    index_of_rank = np.asarray(table_of_rank)
    ranks_of_table = []
    for index in range(len(tables)):
        ranks_of_table.append(np.flatnonzero(index_of_rank == index))

    # Collect the tables that contain each tensor, with their splits. They must agree on its dtype and shape.
    rules: dict[str, list[tuple[int, Any]]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for index, table in enumerate(tables):
        for name, (dtype, shape, rule) in table.items():
            if dtype not in ITEM_BYTES:
                raise CheckpointError(
                    f"{name} cannot be saved: its type {dtype} is not one of {', '.join(ITEM_BYTES)}",
                )
            kind = (dtype, tuple(shape))
            earlier_kind = kinds.setdefault(name, kind)
            if earlier_kind != kind:
                rank = ranks_of_table[index][0]
                raise CheckpointError(
                    f"{name} cannot be saved: it is {kind} on rank {rank}, and {earlier_kind} before",
                )
            rules.setdefault(name, []).append((index, rule))

    # Compute the boxes once per shape and splits, because a model has few of them.
    parts: dict[Any, tuple[HeldBoxes, ...]] = {}
    holdings = {}
    for name, (dtype, shape) in kinds.items():
        key = (shape, repr(rules[name]))
        if key not in parts:
            rules_of_ranks = []
            for index, rule in rules[name]:
                rules_of_ranks.append((ranks_of_table[index], rule))
            parts[key] = _parts(shape, rules_of_ranks)
        holdings[name] = Held(dtype, shape, parts[key])
    return holdings


def num_replicated(holdings: Mapping[str, Held]) -> int:
    """Return the number of boxes that more than one rank holds."""
    count = 0
    for tensor in holdings.values():
        for part in tensor.parts:
            if part.holders > 1:
                count += len(part.ranks)
    return count


def box_of(tensor: Tensor) -> Box:
    """Return offsets and sizes of this rank's shard in the full tensor. A size is 0 if the shard is empty."""
    slices = local_slices(tensor)
    offsets = tuple(s.start for s in slices)
    sizes = tuple(s.stop - s.start for s in slices)
    local_shape = tuple(local_tensor(tensor).shape)
    are_both_empty = 0 in local_shape and 0 in sizes
    if local_shape != sizes and not are_both_empty:
        raise CheckpointError(
            f"a shard has shape {local_shape} instead of {sizes}: this sharding is not supported",
        )
    return offsets, sizes


def boxes_of(shape: Sequence[int], rule: Any, ranks: Ints) -> tuple[Ints, Ints]:
    """Return offsets and sizes, (n, dims) each, of the shards of ``ranks``. Sizes may be 0.

    ``rule`` is a list of splits (size, stride, dim), or a dict with the box of all of them.
    """
    num_ranks = len(ranks)
    dims = len(shape)
    starts = np.zeros((num_ranks, dims), np.int64)
    # A box that no splits describe is the same for all ranks that sent it.
    if isinstance(rule, dict):
        starts[:] = rule["offsets"]
        sizes = np.asarray(rule["sizes"], np.int64)
        return starts, np.broadcast_to(sizes, starts.shape)

    full_shape = np.asarray(shape, np.int64)
    stops = np.broadcast_to(full_shape, starts.shape).copy()
    # Each split divides the result of the previous ones like torch.chunk: the last chunks may be
    # smaller or empty.
    for size, stride, dim in rule:
        # The coordinate of a rank on the axis is a digit of its number.
        coordinate = ranks // stride % size
        start = starts[:, dim]
        stop = stops[:, dim]
        chunk = -(-(stop - start) // size)
        chunk_start = np.minimum(start + chunk * coordinate, stop)
        chunk_stop = np.minimum(chunk_start + chunk, stop)
        starts[:, dim] = chunk_start
        stops[:, dim] = chunk_stop
    return starts, stops - starts


def _kind(tensor: Tensor) -> Any:
    """Return a key that is equal for tensors whose shards on this rank have equal boxes."""
    if not is_distributed(tensor):
        return (tensor.shape,)
    local_shape = local_tensor(tensor).shape
    return tensor.shape, local_shape, id(tensor.device_mesh), tensor.placements


def _rule(tensor: Tensor, digits: dict[int, list[tuple[int, int] | None]]) -> Any:
    """Describe the shard of a rank in the form that ``boxes_of`` evaluates for any rank.

    Return the splits (size, stride, dim) in the order in which they apply. If no splits describe this
    rank's shard exactly, return its box as a dict. ``digits`` caches the result of ``_digits`` per mesh.
    """
    offsets, sizes = box_of(tensor)
    if not is_distributed(tensor):
        return []
    mesh = tensor.device_mesh
    if id(mesh) not in digits:
        digits[id(mesh)] = _digits(mesh.mesh.numpy())
    digits_of_axes = digits[id(mesh)]

    # The order of ops.dtensor.local_slices: strided splits (FSDP over tensor parallelism) come last.
    order = sorted(enumerate(tensor.placements), key=lambda item: _is_strided(item[1]))
    rule = []
    for axis, placement in order:
        if mesh.size(axis) <= 1:
            continue
        digit = digits_of_axes[axis]
        dim = sharded_dim(placement)
        # A replicated axis splits nothing, so its digit does not matter.
        if digit is not None and dim is not None:
            size, stride = digit
            rule.append([size, stride, dim])

    # Use the splits only if they describe this rank's shard exactly. Otherwise return its box.
    this_rank = np.array([dist.get_rank()])
    split_offsets, split_sizes = boxes_of(tensor.shape, rule, this_rank)
    split_box = (tuple(split_offsets[0].tolist()), tuple(split_sizes[0].tolist()))
    if split_box == (offsets, sizes):
        return rule
    return {"offsets": offsets, "sizes": sizes}


def _is_strided(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"


def _digits(mesh: Ints) -> list[tuple[int, int] | None]:
    """Return size and stride of each mesh axis, or None for an axis whose coordinates are not digits of the rank."""
    digits: list[tuple[int, int] | None] = []
    for axis, size in enumerate(mesh.shape):
        # The ranks along the axis must be equally far apart, in ascending order.
        lines = np.moveaxis(mesh, axis, 0).reshape(size, -1)
        steps = np.unique(np.diff(lines[:, 0])).tolist()
        if len(steps) == 1 and steps[0] > 0:
            digits.append((size, steps[0]))
        else:
            digits.append(None)
    return digits


def _parts(
    shape: tuple[int, ...], splits_of_ranks: Sequence[tuple[Ints, Any]]
) -> tuple[HeldBoxes, ...]:
    """Return the distinct boxes of a tensor, grouped by their number of holders.

    ``splits_of_ranks`` are pairs of ranks and the rule of their shards (see ``boxes_of``).
    """
    all_ranks = []
    all_offsets = []
    all_sizes = []
    for ranks_of_rule, rule in splits_of_ranks:
        offsets_of_rule, sizes_of_rule = boxes_of(shape, rule, ranks_of_rule)
        all_ranks.append(ranks_of_rule)
        all_offsets.append(offsets_of_rule)
        all_sizes.append(sizes_of_rule)
    ranks = np.concatenate(all_ranks)
    offsets = np.concatenate(all_offsets)
    sizes = np.concatenate(all_sizes)

    # A rank with an empty shard is not a holder.
    is_full = (sizes > 0).all(1)
    has_equal_size = (sizes == sizes[0]).all()
    is_even = bool(is_full.all() and has_equal_size)
    ranks = ranks[is_full]
    if not len(ranks):
        return ()

    # Sort by offsets, sizes and rank, so the holders of a box are adjacent.
    boxes = np.concatenate([offsets[is_full], sizes[is_full]], 1)
    columns = boxes.T[::-1]  # lexsort takes the most significant key last
    order = np.lexsort((ranks, *columns))
    ranks = ranks[order]
    boxes = boxes[order]
    is_next_box = (boxes[1:] != boxes[:-1]).any(1)
    firsts = np.concatenate([[0], 1 + is_next_box.nonzero()[0]])
    counts = np.diff([*firsts, len(ranks)])

    # Create one part for each number of holders, so the ranks of a part form a matrix.
    dims = len(shape)
    parts = []
    for count in np.unique(counts):
        firsts_of_part = firsts[counts == count]
        rows = firsts_of_part[:, None] + np.arange(count)
        is_only_part = len(firsts_of_part) == len(firsts)
        part = HeldBoxes(
            offsets=boxes[firsts_of_part, :dims],
            sizes=boxes[firsts_of_part, dims:],
            ranks=ranks[rows],
            is_even=is_even and is_only_part,
        )
        parts.append(part)
    return tuple(parts)
