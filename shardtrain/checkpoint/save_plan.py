"""Which rank writes which piece of which tensor, and where in its file: the same on all ranks, and planned once.

A piece that several ranks hold is written once, by the one with the least to write. What is planned grows with the
number of kinds of tensors, not of ranks: the pieces of a tensor that are cut evenly are one ``Grid``.
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
    """What goes where, equal on all ranks: the stored tensors, and the bytes that each rank writes."""

    tensors: Mapping[str, StoredTensor]
    bytes_of: list[int]
    held: Mapping[str, Held] = field(default_factory=dict)
    """Which ranks hold which part."""
    own: Mapping[str, list[Any]] = field(default_factory=dict)
    """What this rank says of its tensors: as long as no rank says other things, the plan holds."""

    def pieces_of(self, rank: int) -> list[tuple[str, int]]:
        """Name and bytes of each piece that a rank writes, in the order of its file."""
        number = self.file_numbers[rank]
        pieces = [
            (grid.begin, name, grid.numel * ITEM_BYTES[stored.dtype])
            for name, stored in self.tensors.items()
            for grid in stored.grids
            if grid.is_in(number)
        ]
        return [(name, num_bytes) for _, name, num_bytes in sorted(pieces)]

    def names_of(self, rank: int) -> list[str]:
        """Tensors of which a rank writes a piece, in the order of its file."""
        return [name for name, _ in self.pieces_of(rank)]

    @cached_property
    def file_numbers(self) -> list[int]:
        """Place of each rank's file in the manifest; -1 for a rank that has nothing to write."""
        return _file_numbers(np.array(self.bytes_of)).tolist()


def plan(tensors: Mapping[str, Tensor], earlier: SavePlan | None = None) -> SavePlan:
    """Share out the writing of all ranks' tensors (a collective); as earlier, where no rank's tensors have changed.

    Raises:
        CheckpointError: on all ranks, where ranks have tensors of one name that differ, or where the manifest would be
            larger than one that a start reads.
    """
    # One flag from each rank in place of all tables: nearly always nothing has changed since the last save.
    own = holders.table_of(tensors)
    if not any_rank(earlier is None or earlier.own != own):
        assert earlier is not None
        return earlier
    held = holders.held_by_all(*holders.tables_of_ranks(own))
    stored, load = share_out(held, dist.get_world_size())
    if (num_bytes := least_bytes(stored)) > MAX_BYTES:
        raise CheckpointError(too_large(num_bytes))
    return SavePlan(stored, load, held, own)


def share_out(held: Mapping[str, Held], num_ranks: int) -> tuple[dict[str, StoredTensor], list[int]]:
    """Who writes what, as a function of who holds what: the stored tensors, and the bytes that each rank writes.

    What one rank alone holds is decided; then what several hold evens out the rest, piece by piece to the holder with
    the least to write. Boxes of one tensor have no holder in common, so they are decided at once. What all hold evenly
    comes first in the files, so that it begins at the same byte of each and is one grid.
    """
    # The order decides what is written where, so it must be the same on all ranks: by holders, evenness and name.
    order = sorted(
        ((part.holders, not part.is_even, name, part) for name, one in held.items() for part in one.parts),
        key=lambda item: item[:3],
    )
    item_bytes = {name: ITEM_BYTES[one.dtype] for name, one in held.items()}

    def place(load: Ints) -> Iterator[tuple[str, HeldBoxes, Ints, Ints]]:
        """Of each part in turn: the writer of each box, and where its bytes begin in the writer's file."""
        for _, _, name, part in order:
            writers = part.ranks[:, 0]
            if part.holders > 1:
                writers = part.ranks[np.arange(len(writers)), load[part.ranks].argmin(1)]
            begins = load[writers]
            load[writers] = begins + part.numels * item_bytes[name]
            yield name, part, writers, begins

    # Files are numbered by the ranks that write at all: whoever holds something alone. Where not everybody does, all is
    # placed once to see.
    load = np.zeros(num_ranks, np.int64)
    for part in {id(part): part for *_, part in order if part.holders == 1}.values():
        load[part.ranks] = 1
    if not load.all():
        load[:] = 0
        for _ in place(load):
            pass
    numbers = _file_numbers(load)

    # Many tensors are cut alike, and lie in their files at other places: which places are the same decides how boxes
    # become grids, and not where they are. So the grids of one such kind are found once, with numbers for places.
    load = np.zeros(num_ranks, np.int64)
    grids: dict[str, list[Grid]] = {name: [] for name in held}
    known: dict[Any, list[Grid]] = {}
    for name, part, writers, begins in place(load):
        runs = np.concatenate([[0], 1 + np.flatnonzero(np.diff(begins))])
        values, number = np.unique(begins[runs], return_inverse=True)
        same = hashlib.sha256(runs.tobytes() + number.tobytes()).digest()
        key = (id(part), hashlib.sha256(writers.tobytes()).digest() if part.holders > 1 else None, same)
        if key not in known:
            which = np.repeat(number, np.diff([*runs, len(begins)]))
            known[key] = _fewest(part.offsets, part.sizes, numbers[writers], which)
        grids[name] += [replace(grid, begin=int(values[grid.begin])) for grid in known[key]]
    stored = {name: StoredTensor(held[name].dtype, held[name].shape, tuple(grids[name])) for name in sorted(held)}
    return stored, load.tolist()


def _fewest(offsets: Ints, sizes: Ints, files: Ints, begins: Ints) -> list[Grid]:
    """Boxes as few grids, tried with the first dimension outermost and with the last."""
    grids = compress(offsets, sizes, files, begins)
    if len(grids) > 2 and (offsets != offsets[0]).any(0).sum() > 1:
        order = np.lexsort(offsets.T)
        other = compress(offsets[order], sizes[order], files[order], begins[order])
        grids = min(grids, other, key=len)
    return grids


def compress(offsets: Ints, sizes: Ints, files: Ints, begins: Ints) -> list[Grid]:
    """Boxes as few grids: (n, dims) offsets and sizes, ordered by offsets; a file of each, and its place there.

    Neighbours of equal sizes and places, one behind the other along a dimension with a constant step between files,
    become one; then such runs of runs, until nothing more can be joined.
    """
    # Of each run: its first box, what it covers, and the axes that repeat the box. At first every box is a run.
    firsts = np.arange(len(offsets))
    whole = sizes.copy()
    axes: list[tuple[Axis, ...]] = [()] * len(offsets)
    dims = offsets.shape[1]
    while len(firsts) > 1:
        # Which neighbours can be joined: equal in all but the file and a dimension, along which one follows the other.
        at = firsts[:-1]
        to = firsts[1:]
        moved = offsets[to] - offsets[at]
        step = files[to] - files[at]
        alike = (begins[to] == begins[at]) & (whole[1:] == whole[:-1]).all(1) & (sizes[to] == sizes[at]).all(1)
        if any(axes):
            alike &= np.fromiter((a == b for a, b in itertools.pairwise(axes)), bool, len(at))
        moved_along = (moved != 0).sum(1) == 1
        dim = np.abs(moved).argmax(1) if dims else np.zeros(len(at), np.int64)
        extent = whole[:-1][np.arange(len(at)), dim] if dims else dim
        follows = moved[np.arange(len(at)), dim] == extent if dims else np.zeros(len(at), bool)
        joined = alike & moved_along & follows & (step != 0)
        if not joined.any():
            break

        # Links between neighbours that are joined in the same way, one number for each way (a dimension and a step).
        key = np.where(joined, dim * (2**40) + step, -(2**62))
        changes = np.flatnonzero(key[1:] != key[:-1]) + 1

        # Links begin..end-1 are alike: they join the runs begin..end, of which the first may be taken already, by the
        # links before. What is taken by none stays as it is. ``place`` is the first run that is not taken.
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
    return [
        Grid(tuple(offsets[i].tolist()), tuple(sizes[i].tolist()), int(files[i]), int(begins[i]), axes_of_run)
        for i, axes_of_run in zip(firsts.tolist(), axes, strict=True)
    ]


def _file_numbers(load: Ints) -> Ints:
    return np.where(load > 0, np.cumsum(load > 0) - 1, -1)
