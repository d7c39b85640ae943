"""Plan of a save: the rank that writes each piece of each tensor, and its offset in the rank's file.

All ranks compute the same plan, once. A replicated piece is written once, by the holder with the
least to write. The size of the plan grows with the number of kinds of tensors, not of ranks: an
evenly sharded tensor is one ``Grid``.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch import Tensor

from shardtrain.checkpoint import holders
from shardtrain.checkpoint.collectives import any_rank
from shardtrain.checkpoint.grids import Axis, Grid
from shardtrain.checkpoint.holders import Held, HeldBoxes
from shardtrain.checkpoint.manifest import MAX_BYTES, StoredTensor, least_bytes, too_large
from shardtrain.checkpoint.resharding import Ints
from shardtrain.facts.dtypes import ITEM_BYTES
from shardtrain.utils.errors import CheckpointError


@dataclass(frozen=True)
class SavePlan:
    """Plan of a save. Equal on all ranks, except ``table``.

    Attributes:
        tensors: The stored tensors, by name.
        bytes_of: Number of bytes that each rank writes.
        holdings: Holders of each tensor.
        table: This rank's description of its tensors (``holders.table_of``). The plan is reused until
            one rank's changes.
    """

    tensors: Mapping[str, StoredTensor]
    bytes_of: list[int]
    holdings: Mapping[str, Held] = field(default_factory=dict)
    table: Mapping[str, list[Any]] = field(default_factory=dict)

    def pieces_of(self, rank: int) -> list[tuple[str, int]]:
        """Return name and bytes of each piece that a rank writes, in the order of its file."""
        number = self.file_numbers[rank]
        pieces = []
        for name, stored in self.tensors.items():
            for grid in stored.grids:
                if grid.is_in(number):
                    num_bytes = grid.numel * ITEM_BYTES[stored.dtype]
                    pieces.append((grid.begin, name, num_bytes))
        pieces.sort()
        return [(name, num_bytes) for _, name, num_bytes in pieces]

    def names_of(self, rank: int) -> list[str]:
        """Return the names of the tensors of which a rank writes a piece, in the order of its file."""
        return [name for name, _ in self.pieces_of(rank)]

    @cached_property
    def file_numbers(self) -> list[int]:
        """Index of each rank's file in the manifest. -1 for a rank that writes nothing."""
        return _file_numbers(np.array(self.bytes_of)).tolist()


def plan(tensors: Mapping[str, Tensor], earlier: SavePlan | None = None) -> SavePlan:
    """Plan a save of all ranks' tensors (a collective). Return ``earlier`` if no rank's tensors have changed.

    Raises:
        CheckpointError: on all ranks, if tensors of the same name differ between ranks, or if the
            manifest would be too large to be read again.
    """
    # Exchange one flag instead of all tables, because tensors rarely change between saves.
    table = holders.table_of(tensors)
    has_changed = earlier is None or earlier.table != table
    if not any_rank(has_changed):
        assert earlier is not None
        return earlier
    tables, table_of_rank = holders.tables_of_ranks(table)
    holdings = holders.held_by_all(tables, table_of_rank)
    stored, load = share_out(holdings, dist.get_world_size())
    num_bytes = least_bytes(stored)
    if num_bytes > MAX_BYTES:
        raise CheckpointError(too_large(num_bytes))
    return SavePlan(stored, load, holdings, table)


def share_out(
    holdings: Mapping[str, Held], num_ranks: int
) -> tuple[dict[str, StoredTensor], list[int]]:
    """Assign the boxes to ranks. Return the stored tensors, and the number of bytes that each rank writes.

    A box with one holder is written by it. Then each replicated box goes to the holder with the
    least to write so far. Boxes of one tensor have different holders, so they are assigned
    together. Evenly sharded tensors come first in the files. They then begin at the same offset of
    each file, and are one grid.
    """
    parts = _parts_in_order(holdings)

    # Only ranks that write something have a file. A rank that is the only holder of a box writes
    # it. If that does not apply to all ranks, assign everything once to find the ranks that write.
    load = np.zeros(num_ranks, np.int64)
    parts_of_one_holder = {id(one.part): one.part for one in parts if one.part.holders == 1}
    for part in parts_of_one_holder.values():
        load[part.ranks] = 1
    if not load.all():
        load[:] = 0
        for one in parts:
            _assign(one, load)
    numbers = _file_numbers(load)

    # Many tensors are sharded in the same way but have different offsets in their files. A grid only
    # depends on which boxes have equal offsets, not on the offsets themselves. So compute the grids once
    # per sharding pattern, with indices instead of offsets.
    load = np.zeros(num_ranks, np.int64)
    grids: dict[str, list[Grid]] = {name: [] for name in holdings}
    grids_of_pattern: dict[Any, list[Grid]] = {}
    for one in parts:
        part = one.part
        writers, begins = _assign(one, load)
        # Runs of boxes with equal offsets, and the index of each run's offset among the distinct offsets.
        runs = np.concatenate([[0], 1 + np.flatnonzero(np.diff(begins))])
        distinct_begins, index = np.unique(begins[runs], return_inverse=True)
        pattern = hashlib.sha256(runs.tobytes() + index.tobytes()).digest()
        # The writers of boxes with one holder follow from the part.
        assignment = None
        if part.holders > 1:
            assignment = hashlib.sha256(writers.tobytes()).digest()
        key = (id(part), assignment, pattern)
        if key not in grids_of_pattern:
            run_lengths = np.diff([*runs, len(begins)])
            index_of_box = np.repeat(index, run_lengths)
            files = numbers[writers]
            grids_of_pattern[key] = _fewest(part.offsets, part.sizes, files, index_of_box)
        for grid in grids_of_pattern[key]:
            begin = int(distinct_begins[grid.begin])
            grids[one.name].append(replace(grid, begin=begin))
    stored = {}
    for name in sorted(holdings):
        tensor = holdings[name]
        stored[name] = StoredTensor(tensor.dtype, tensor.shape, tuple(grids[name]))
    return stored, load.tolist()


class _Part(NamedTuple):
    """Boxes of a tensor with an equal number of holders, and the bytes per element."""

    name: str
    part: HeldBoxes
    item_bytes: int


def _parts_in_order(holdings: Mapping[str, Held]) -> list[_Part]:
    """Return the parts of all tensors in the order in which they are assigned to ranks.

    The order determines the assignment, so it must be equal on all ranks: by holders, evenness and name.
    """
    parts = []
    for name, tensor in holdings.items():
        item_bytes = ITEM_BYTES[tensor.dtype]
        for part in tensor.parts:
            parts.append(_Part(name, part, item_bytes))
    parts.sort(key=lambda one: (one.part.holders, not one.part.is_even, one.name))
    return parts


def _assign(one: _Part, load: Ints) -> tuple[Ints, Ints]:
    """Return the writer of each box of a part, and the offset of the box in the writer's file.

    ``load`` is the number of bytes that each rank writes, and is updated in place.
    """
    # Each rank holds at most one box of a part, so no writer occurs twice. Of the ranks that
    # hold a box, the one with the fewest bytes so far writes it.
    ranks = one.part.ranks
    writers = ranks[:, 0]
    if one.part.holders > 1:
        least_loaded = load[ranks].argmin(1)
        writers = ranks[np.arange(len(ranks)), least_loaded]
    begins = load[writers]
    load[writers] = begins + one.part.numels * one.item_bytes
    return writers, begins


def _fewest(offsets: Ints, sizes: Ints, files: Ints, begins: Ints) -> list[Grid]:
    """Compress boxes to grids, ordered by the first dimension and by the last. Return the smaller result."""
    grids = compress(offsets, sizes, files, begins)
    if len(grids) <= 2:
        return grids
    is_split_dim = (offsets != offsets[0]).any(0)
    if is_split_dim.sum() <= 1:
        return grids
    order = np.lexsort(offsets.T)
    by_last = compress(offsets[order], sizes[order], files[order], begins[order])
    return min(grids, by_last, key=len)


def compress(offsets: Ints, sizes: Ints, files: Ints, begins: Ints) -> list[Grid]:
    """Compress boxes to a small number of grids.

    Adjacent boxes of equal size and file offset that follow each other along a dimension, with a
    constant step between files, become one run. Runs are joined in the same way until no more can
    be joined.

    Args:
        offsets, sizes: (n, dims), ordered by offsets.
        files: (n,), the file of each box.
        begins: (n,), the offset of each box in its file.
    """
    # For each run: its first box, the size of its area, and the axes that repeat the box. Initially
    # each box is a run.
    firsts = np.arange(len(offsets))
    areas = sizes.copy()
    axes: list[tuple[Axis, ...]] = [()] * len(offsets)
    while len(firsts) > 1:
        at = firsts[:-1]
        to = firsts[1:]
        step = files[to] - files[at]
        has_equal_boxes = (begins[to] == begins[at]) & (sizes[to] == sizes[at]).all(1)
        has_equal_areas = (areas[1:] == areas[:-1]).all(1)
        joined = has_equal_boxes & has_equal_areas & (step != 0)
        if any(axes):
            has_equal_axes = [a == b for a, b in itertools.pairwise(axes)]
            joined &= np.array(has_equal_axes)
        follows, dim = _followers(offsets[to] - offsets[at], areas[:-1])
        joined &= follows
        if not joined.any():
            break

        # Group the links between neighbors by dimension and step.
        key = np.where(joined, dim * (2**40) + step, -(2**62))
        changes = np.flatnonzero(key[1:] != key[:-1]) + 1
        edges = [0, *changes.tolist(), len(key)]

        # Link i joins the runs i and i + 1, so the links begin..end-1 of a group merge the runs
        # begin..end. If the previous group already merged run ``begin``, start after it. Runs without
        # links stay as they are. ``place`` is the first run that is not handled yet.
        kept: list[int] = []
        new_areas: list[Ints] = []
        new_axes: list[tuple[Axis, ...]] = []
        place = 0
        for begin, end in itertools.pairwise(edges):
            start = max(begin, place)
            if not joined[begin]:
                kept.extend(range(start, end))
                new_areas.extend(areas[start:end])
                new_axes.extend(axes[start:end])
                place = max(place, end)
                continue
            count = end + 1 - start
            if count > 1:
                along = int(dim[begin])
                area = areas[start].copy()
                area[along] *= count
                axis = Axis(count, along, int(step[begin]))
                kept.append(start)
                new_areas.append(area)
                new_axes.append((*axes[start], axis))
                place = end + 1
        kept.extend(range(place, len(firsts)))
        new_areas.extend(areas[place:])
        new_axes.extend(axes[place:])
        firsts = firsts[kept]
        areas = np.array(new_areas)
        axes = new_axes

    grids = []
    for first, axes_of_run in zip(firsts.tolist(), axes, strict=True):
        grid = Grid(
            offsets=tuple(offsets[first].tolist()),
            sizes=tuple(sizes[first].tolist()),
            file=int(files[first]),
            begin=int(begins[first]),
            axes=axes_of_run,
        )
        grids.append(grid)
    return grids


def _followers(moved: Ints, areas: Ints) -> tuple[npt.NDArray[np.bool_], Ints]:
    """Find neighbors that follow each other without a gap along one dimension.

    Args:
        moved: (n, dims), the offset of each next run relative to the run before.
        areas: (n, dims), the size of each run before.

    Returns:
        True for each run that follows the run before, and the dimension along which it does.
    """
    num_links, dims = moved.shape
    if not dims:
        # Scalars have no dimension along which they could follow each other.
        return np.zeros(num_links, bool), np.zeros(num_links, np.int64)
    differs_in_one_dim = (moved != 0).sum(1) == 1
    dim = np.abs(moved).argmax(1)
    links = np.arange(num_links)
    is_adjacent = moved[links, dim] == areas[links, dim]
    return differs_in_one_dim & is_adjacent, dim


def _file_numbers(load: Ints) -> Ints:
    return np.where(load > 0, np.cumsum(load > 0) - 1, -1)
