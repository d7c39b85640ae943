"""Which ranks hold which part of which tensor: every rank computes it for all from what little they tell each other.

Where a rank's part lies follows from the tensor's shape and the rank's number: each axis of the mesh is a digit of it,
and splits one dimension. A rank says these rules once per kind of tensor, and ranks that say the same are heard once:
one text per pipeline stage, whatever the number of ranks. A part that no rule of digits gives is said as it is.
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
"""A name with the number of a layer in it; 007 is a name."""
Table = Mapping[str, list[Any]]
"""What a rank says of its tensors: by name the type, the shape, and the rule or box of its part."""


@dataclass(frozen=True, eq=False)
class HeldBoxes:
    """Boxes of one tensor that each have equally many holders, in the order of their offsets."""

    offsets: Ints
    """(n, dims)"""
    sizes: Ints
    """(n, dims); none is empty"""
    ranks: Ints
    """(n, holders), ascending in each row"""
    is_even: bool
    """Whether all ranks that have the tensor hold one of its boxes, and all boxes have one size."""

    @property
    def holders(self) -> int:
        """How many ranks hold each of its boxes."""
        return int(self.ranks.shape[1])

    @cached_property
    def numels(self) -> Ints:
        """Elements of each of its boxes."""
        return self.sizes.prod(1, dtype=np.int64)

    def row_of(self, rank: int) -> int | None:
        """The box that a rank holds; none where it holds another part, or none."""
        rows = (self.ranks == rank).any(1).nonzero()[0]
        return int(rows[0]) if len(rows) else None


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor, and who holds what of it."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[HeldBoxes, ...]


def table_of(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """What this rank says of its tensors.

    Raises:
        CheckpointError: for a tensor that is split in a way that is not known here.
    """
    digits: dict[int, list[tuple[int, int] | None]] = {}
    known: dict[Any, Any] = {}  # layers are alike
    table = {}
    for name, tensor in tensors.items():
        key = _kind(tensor)
        if key not in known:
            known[key] = _rule(tensor, digits)
        table[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), known[key]]
    return table


def find_holders(tensors: Mapping[str, Tensor]) -> dict[str, Held]:
    """Who holds what of all ranks' tensors (a collective); equal on all ranks.

    Raises:
        CheckpointError: on all ranks, where two have tensors of one name and of other types or shapes.
    """
    return held_by_all(*tables_of_ranks(table_of(tensors)))


def tables_of_ranks(own: Table) -> tuple[list[Table], list[int]]:
    """The distinct tables of all ranks, and which of them each rank says (a collective)."""
    folded, number_of = gather_distinct_json(fold(own))
    return [unfold(one) for one in folded], number_of


def fold(table: Table) -> list[list[Any]]:
    """A table in a few lines: layers are alike, so what differs in the number of a layer alone is one.

    >>> fold({"layers.0.w": ["float32", [2], []], "layers.1.w": ["float32", [2], []], "head": ["float32", [3], []]})
    [['layers.', '.w', ['float32', [2], []], [[0, 2]]], ['head', '', ['float32', [3], []], []]]
    """
    lines: dict[tuple[str, str, str], list[Any]] = {}
    for name, value in table.items():
        match = _LAYER.fullmatch(name)
        before, number, after = match.groups() if match else (name, "", "")
        runs = lines.setdefault((before, after, repr(value)), [before, after, value, []])[3]
        if number and runs and runs[-1][1] == int(number):
            runs[-1][1] += 1
        elif number:
            runs.append([int(number), int(number) + 1])
    return list(lines.values())


def unfold(lines: Sequence[Sequence[Any]]) -> dict[str, list[Any]]:
    """The table that was folded; its names may come in another order."""
    return {
        name: value
        for before, after, value, runs in lines
        for name in ([f"{before}{n}{after}" for start, stop in runs for n in range(start, stop)] or [before])
    }


def held_by_all(tables: Sequence[Table], table_of_rank: Sequence[int]) -> dict[str, Held]:
    """Who holds what, where rank r says ``tables[table_of_rank[r]]``; needs no process group. Raises as above."""
    # Which tables name each tensor, with what rule; those that do must agree on type and shape.
    ranks_of = [np.flatnonzero(np.asarray(table_of_rank) == number) for number in range(len(tables))]
    rules: dict[str, list[tuple[int, Any]]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for number, table in enumerate(tables):
        for name, (dtype, shape, rule) in table.items():
            kind = (dtype, tuple(shape))
            if dtype not in ITEM_BYTES:
                raise CheckpointError(f"{name} cannot be saved: its type {dtype} is not one of {', '.join(ITEM_BYTES)}")
            if kinds.setdefault(name, kind) != kind:
                raise CheckpointError(
                    f"{name} cannot be saved: it is {kind} on rank {ranks_of[number][0]}, and {kinds[name]} before"
                )
            rules.setdefault(name, []).append((number, rule))

    # Layers are alike: a model has few shapes and rules, and the parts of each are worked out once.
    known: dict[Any, tuple[HeldBoxes, ...]] = {}
    held = {}
    for name, (dtype, shape) in kinds.items():
        key = (shape, repr(rules[name]))
        if key not in known:
            known[key] = _parts(shape, [(ranks_of[number], rule) for number, rule in rules[name]])
        held[name] = Held(dtype, shape, known[key])
    return held


def num_replicated(held: Mapping[str, Held]) -> int:
    """How many boxes several ranks hold."""
    return sum(len(part.ranks) for one in held.values() for part in one.parts if part.holders > 1)


def box_of(tensor: Tensor) -> Box:
    """Where this rank's part is in the whole tensor; sizes hold a 0 where it has none."""
    slices = local_slices(tensor)
    box = tuple(s.start for s in slices), tuple(s.stop - s.start for s in slices)
    own = tuple(local_tensor(tensor).shape)
    if own != box[1] and not (0 in own and 0 in box[1]):
        raise CheckpointError(f"a rank's part has shape {own} and should have {box[1]}: this sharding is not supported")
    return box


def boxes_of(shape: Sequence[int], rule: Any, ranks: Ints) -> tuple[Ints, Ints]:
    """Offsets and sizes of the parts of ranks, (n, dims) each, by the rule that they say; sizes may be 0."""
    starts = np.zeros((len(ranks), len(shape)), np.int64)
    stops = np.broadcast_to(np.asarray(shape, np.int64), starts.shape).copy()
    if isinstance(rule, dict):
        starts[:] = rule["offsets"]
        sizes = rule["sizes"]
        return starts, np.broadcast_to(np.asarray(sizes, np.int64), starts.shape)
    # Each split cuts what the ones before it left, as torch.chunk does: the last chunks may be smaller, or empty.
    for size, stride, dim in rule:
        at = ranks // stride % size
        chunk = -(-(stops[:, dim] - starts[:, dim]) // size)
        starts[:, dim] = np.minimum(starts[:, dim] + chunk * at, stops[:, dim])
        stops[:, dim] = np.minimum(starts[:, dim] + chunk, stops[:, dim])
    return starts, stops - starts


def _kind(tensor: Tensor) -> Any:
    """Tensors of which this is the same have the same part of a rank."""
    if not is_distributed(tensor):
        return (tensor.shape,)
    return tensor.shape, local_tensor(tensor).shape, id(tensor.device_mesh), tensor.placements


def _rule(tensor: Tensor, digits: dict[int, list[tuple[int, int] | None]]) -> Any:
    """How a rank's number gives its part: (size, stride, dim) of each split, in the order in which they are made."""
    offsets, sizes = box_of(tensor)
    if not is_distributed(tensor):
        return []
    mesh = tensor.device_mesh
    if id(mesh) not in digits:
        digits[id(mesh)] = _digits(mesh.mesh.numpy())
    # In the order of ops.dtensor.local_slices: strided splits (FSDP over tensor parallelism) cut what the others left.
    order = sorted(enumerate(tensor.placements), key=lambda item: type(item[1]).__name__ == "_StridedShard")
    splits = [(digits[id(mesh)][axis], sharded_dim(placement)) for axis, placement in order if mesh.size(axis) > 1]
    rule = [[*digit, dim] for digit, dim in splits if digit is not None and dim is not None]
    # A rule counts only if it gives this rank's part as it is; else the part is said as it is.
    by_rule = boxes_of(tensor.shape, rule, np.array([dist.get_rank()]))
    if (tuple(by_rule[0][0].tolist()), tuple(by_rule[1][0].tolist())) == (offsets, sizes):
        return rule
    return {"offsets": offsets, "sizes": sizes}


def _digits(mesh: Ints) -> list[tuple[int, int] | None]:
    """Size and stride of each axis of a mesh, where its coordinates are digits of the ranks' numbers."""
    digits: list[tuple[int, int] | None] = []
    for axis, size in enumerate(mesh.shape):
        line = np.moveaxis(mesh, axis, 0).reshape(size, -1)[:, 0]
        steps = np.unique(np.diff(line)).tolist()
        digits.append((size, steps[0]) if len(steps) == 1 and steps[0] > 0 else None)
    return digits


def _parts(shape: tuple[int, ...], said: Sequence[tuple[Ints, Any]]) -> tuple[HeldBoxes, ...]:
    """The distinct boxes of a tensor, by how many ranks hold them; ``said`` are ranks with the rule that they say."""
    ranks = np.concatenate([ranks for ranks, _ in said])
    boxes = [boxes_of(shape, rule, ranks) for ranks, rule in said]
    offsets, sizes = (np.concatenate([box[i] for box in boxes]) for i in range(2))
    full = (sizes > 0).all(1)
    is_even = bool(full.all() and (sizes == sizes[0]).all())
    ranks = ranks[full]
    offsets = offsets[full]
    sizes = sizes[full]
    if not len(ranks):
        return ()

    # Sorted by offsets, sizes and rank, the holders of a box stand next to each other.
    both = np.concatenate([offsets, sizes], 1)
    order = np.lexsort((ranks, *both.T[::-1]))
    ranks = ranks[order]
    both = both[order]
    firsts = np.concatenate([[0], 1 + (both[1:] != both[:-1]).any(1).nonzero()[0]])
    counts = np.diff([*firsts, len(ranks)])

    # One part for each number of holders, so that its ranks are a matrix.
    dims = len(shape)
    parts = []
    for count in np.unique(counts):
        boxes_at = firsts[counts == count]
        ranks_of_boxes = ranks[boxes_at[:, None] + np.arange(count)]
        all_alike = is_even and len(boxes_at) == len(firsts)
        parts.append(HeldBoxes(both[boxes_at, :dims], both[boxes_at, dims:], ranks_of_boxes, all_alike))
    return tuple(parts)
