"""Plan of a save: the rank that writes each piece of each tensor, and its offset in the rank's file.

All ranks compute the same plan, once. A replicated piece is written once, by the holder with the
least to write. The size of the plan grows with the number of kinds of tensors, not of ranks: an
evenly sharded tensor is one ``Grid``.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
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
    """Plan of a save. Equal on all ranks, except ``own``.

    Attributes:
        tensors: The stored tensors, by name.
        bytes_of: Number of bytes that each rank writes.
        held: Holders of each tensor.
        own: This rank's description of its tensors (``holders.table_of``). The plan is reused until
            one rank's changes.
    """

    tensors: Mapping[str, StoredTensor]
    bytes_of: list[int]
    held: Mapping[str, Held] = field(default_factory=dict)
    own: Mapping[str, list[Any]] = field(default_factory=dict)

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
    own = holders.table_of(tensors)
    if not any_rank(earlier is None or earlier.own != own):
        assert earlier is not None
        return earlier
    held = holders.held_by_all(*holders.tables_of_ranks(own))
    stored, load = share_out(held, dist.get_world_size())
    if (num_bytes := least_bytes(stored)) > MAX_BYTES:
        raise CheckpointError(too_large(num_bytes))
    return SavePlan(stored, load, held, own)


def share_out(
    held: Mapping[str, Held], num_ranks: int
) -> tuple[dict[str, StoredTensor], list[int]]:
    """Assign the boxes to ranks. Return the stored tensors, and the number of bytes that each rank writes.

    A box with one holder is written by it. Then each replicated box goes to the holder with the
    least to write so far. Boxes of one tensor have different holders, so they are assigned
    together. Evenly sharded tensors come first in the files. They then begin at the same offset of
    each file, and are one grid.
    """
    # The order determines the assignment, so it must be equal on all ranks: by holders, evenness and name.
    order: list[tuple[int, bool, str, HeldBoxes]] = []
    for name, tensor in held.items():
        for part in tensor.parts:
            order.append((part.holders, not part.is_even, name, part))
    order.sort(key=lambda item: item[:3])
    item_bytes = {name: ITEM_BYTES[one.dtype] for name, one in held.items()}

    def place(load: Ints) -> Iterator[tuple[str, HeldBoxes, Ints, Ints]]:
        """Assign the boxes of each part. Yield the writer of each box, and its offset in the
        writer's file.
        """
        for _, _, name, part in order:
            # Each rank holds at most one box of a part, so no writer occurs twice. Of the ranks that
            # hold a box, the one with the fewest bytes so far writes it.
            writers = part.ranks[:, 0]
            if part.holders > 1:
                writers = part.ranks[np.arange(len(writers)), load[part.ranks].argmin(1)]
            begins = load[writers]
            load[writers] = begins + part.numels * item_bytes[name]
            yield name, part, writers, begins

    # Only ranks that write something have a file. A rank that is the only holder of a box writes
    # it. If that does not apply to all ranks, assign everything once to find the ranks that write.
    load = np.zeros(num_ranks, np.int64)
    parts_of_one_holder = {id(part): part for *_, part in order if part.holders == 1}
    for part in parts_of_one_holder.values():
        load[part.ranks] = 1
    if not load.all():
        load[:] = 0
        for _ in place(load):
            pass
    numbers = _file_numbers(load)

    # Many tensors are sharded in the same way but have different offsets in their files. A grid only
    # depends on which boxes have equal offsets, not on the offsets themselves. So compute the grids once
    # per sharding pattern, with indices instead of offsets.
    load = np.zeros(num_ranks, np.int64)
    grids: dict[str, list[Grid]] = {name: [] for name in held}
    known: dict[Any, list[Grid]] = {}
    for name, part, writers, begins in place(load):
        # Runs of boxes with equal offsets, and the index of each run's offset among the distinct offsets.
        runs = np.concatenate([[0], 1 + np.flatnonzero(np.diff(begins))])
        values, number = np.unique(begins[runs], return_inverse=True)
        pattern = hashlib.sha256(runs.tobytes() + number.tobytes()).digest()
        # The writers of boxes with one holder follow from the part.
        assignment = None
        if part.holders > 1:
            assignment = hashlib.sha256(writers.tobytes()).digest()
        key = (id(part), assignment, pattern)
        if key not in known:
            which = np.repeat(number, np.diff([*runs, len(begins)]))
            known[key] = _fewest(part.offsets, part.sizes, numbers[writers], which)
        grids[name] += [replace(grid, begin=int(values[grid.begin])) for grid in known[key]]
    stored = {}
    for name in sorted(held):
        stored[name] = StoredTensor(held[name].dtype, held[name].shape, tuple(grids[name]))
    return stored, load.tolist()


def _fewest(offsets: Ints, sizes: Ints, files: Ints, begins: Ints) -> list[Grid]:
    """Compress boxes to grids, ordered by the first dimension and by the last. Return the smaller result."""
    grids = compress(offsets, sizes, files, begins)
    if len(grids) <= 2:
        return grids
    num_split_dims = (offsets != offsets[0]).any(0).sum()
    if num_split_dims <= 1:
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
    whole = sizes.copy()
    axes: list[tuple[Axis, ...]] = [()] * len(offsets)
    dims = offsets.shape[1]
    while len(firsts) > 1:
        # Find neighbors that can be joined: they differ only in the file and in one dimension,
        # along which they follow each other.
        at = firsts[:-1]
        to = firsts[1:]
        moved = offsets[to] - offsets[at]
        step = files[to] - files[at]
        alike = (
            (begins[to] == begins[at])
            & (whole[1:] == whole[:-1]).all(1)
            & (sizes[to] == sizes[at]).all(1)
        )
        if any(axes):
            alike &= np.fromiter((a == b for a, b in itertools.pairwise(axes)), bool, len(at))
        moved_along = (moved != 0).sum(1) == 1
        if dims:
            dim = np.abs(moved).argmax(1)
            links = np.arange(len(at))
            follows = moved[links, dim] == whole[:-1][links, dim]
        else:
            # Scalars have no dimension along which they could follow each other.
            dim = np.zeros(len(at), np.int64)
            follows = np.zeros(len(at), bool)
        joined = alike & moved_along & follows & (step != 0)
        if not joined.any():
            break

        # Group the links between neighbors by dimension and step.
        key = np.where(joined, dim * (2**40) + step, -(2**62))
        changes = np.flatnonzero(key[1:] != key[:-1]) + 1

        # Link i joins the runs i and i + 1, so the links begin..end-1 of a group merge the runs
        # begin..end. If the previous group already merged run ``begin``, start after it. Runs without
        # links stay as they are. ``place`` is the first run that is not handled yet.
        kept = []
        new_whole = []
        new_axes = []
        place = 0
        for begin, end in zip([0, *changes.tolist()], [*changes.tolist(), len(key)], strict=True):
            if not joined[begin]:
                for single in range(max(begin, place), end):
                    kept.append(single)
                    new_whole.append(whole[single])
                    new_axes.append(axes[single])
                place = max(place, end)
                continue
            start = max(begin, place)
            count = end + 1 - start
            if count > 1:
                along = int(dim[begin])
                covers = whole[start].copy()
                covers[along] *= count
                kept.append(start)
                new_whole.append(covers)
                new_axes.append((*axes[start], Axis(count, along, int(step[begin]))))
                place = end + 1
        for single in range(place, len(firsts)):
            kept.append(single)
            new_whole.append(whole[single])
            new_axes.append(axes[single])
        firsts = firsts[kept]
        whole = np.array(new_whole)
        axes = new_axes
    grids = []
    for first, axes_of_run in zip(firsts.tolist(), axes, strict=True):
        offsets_of_first = tuple(offsets[first].tolist())
        sizes_of_first = tuple(sizes[first].tolist())
        grids.append(
            Grid(
                offsets_of_first, sizes_of_first, int(files[first]), int(begins[first]), axes_of_run
            ),
        )
    return grids


def _file_numbers(load: Ints) -> Ints:
    return np.where(load > 0, np.cumsum(load > 0) - 1, -1)
