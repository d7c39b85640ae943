"""A rank's part of the tensors, read of the files of a checkpoint that any mesh has saved.

On another mesh a rank may need small pieces of many tensors from thousands of files. Where they lie is computed for all
pieces of a grid at once, and once for all tensors that are cut alike. They are read file by file, those that follow
each other at once, and ``MOST_PIECES`` of all are known at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardtrain.checkpoint import files
from shardtrain.checkpoint.grids import Grid, ranges
from shardtrain.checkpoint.holders import box_of
from shardtrain.checkpoint.manifest import Manifest
from shardtrain.checkpoint.resharding import Box, Ints
from shardtrain.checkpoint.storage import Place
from shardtrain.facts.dtypes import ITEM_BYTES
from shardtrain.ops.dtensor import local_tensor
from shardtrain.utils import activity, garbage_collection
from shardtrain.utils.errors import CheckpointError

MOST_PIECES = 2**17
"""Of which the places are known at a time, some 100 bytes of each."""
_MOST_PLACES = 2**13
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types that NumPy knows too, by their bytes: to copy numbers it does not matter what they mean."""

_Place = tuple[tuple[int, ...], tuple[slice, ...], tuple[slice, ...]]


@garbage_collection.paused()
def read(tensors: Mapping[str, Tensor], manifest: Manifest, folder: Place) -> None:
    """Fill this rank's part of the tensors in place, converting floating-point types. Raises OSError."""
    cuts = _find(tensors, manifest)
    copied = _Copied()
    while pieces := _next_pieces(cuts):
        copied.forget()
        # File by file, each opened once for all pieces that are known of it.
        changes = np.flatnonzero(pieces.files[1:] != pieces.files[:-1]) + 1
        for first, last in itertools.pairwise([0, *changes.tolist(), len(pieces.files)]):
            with contextlib.closing(files.open_stored(folder / manifest.files[pieces.files[first]].name)) as reader:
                _read_of_file(reader, pieces, slice(first, last), copied)


def shorter() -> CheckpointError:
    """What is said of a file that ends before it should."""
    return CheckpointError("a file of the checkpoint became shorter while it was read; start again")


class _Target:
    """What this rank holds of a tensor, and how bytes of a file get there."""

    def __init__(self, tensor: Tensor, dtype: str) -> None:
        self.local = local_tensor(tensor).detach()
        self.item = ITEM_BYTES[dtype]
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.is_as_stored = self.local.dtype == self.dtype and self.local.device.type == "cpu"
        self.is_direct = self.is_as_stored and self.local.is_contiguous()

    @cached_property
    def bytes(self) -> memoryview:
        """Its memory, where that is read into."""
        return memoryview(self.local.reshape(-1).view(torch.uint8).numpy().data)

    @cached_property
    def integers(self) -> np.ndarray:
        """Its memory, where bytes are copied as they are."""
        array: np.ndarray = self.local.view(_INTEGERS[self.item]).numpy()
        return array


class _Copied:
    """Memory for what is read and then copied, of one run at a time."""

    def __init__(self) -> None:
        # each piece begins at a multiple of 8; the system gives memory when it is written to
        self._bytes = np.empty(files.PIECE_BYTES + 8 * files.MOST_VIEWS, np.uint8)
        self._view = memoryview(self._bytes.data)
        self._tensor = torch.from_numpy(self._bytes)
        self._places: dict[tuple[int, int], _Place] = {}  # the same of alike layers

    def view(self, begin: int, num_bytes: int) -> memoryview:
        """Where a piece is read into."""
        return self._view[begin : begin + num_bytes]

    def put(self, begin: int, num_bytes: int, target: _Target, cut: _Cut, row: int) -> None:
        """Copy what is needed of a piece to its place, converted where types differ."""
        place = self._places.get((id(cut), row))
        if place is None:
            if len(self._places) > _MOST_PLACES:
                self._places.clear()
            place = self._places[id(cut), row] = cut.place(row)
        shape, needed, to = place
        if target.is_as_stored:
            data = self._bytes[begin : begin + num_bytes].view(target.integers.dtype)
            target.integers[to] = data.reshape(shape)[needed]
        else:
            rows = self._tensor[begin : begin + num_bytes].view(target.dtype).reshape(shape)
            target.local[to].copy_(rows[needed])

    def forget(self) -> None:
        """The places of cuts that may be gone."""
        self._places.clear()


class _Cut(NamedTuple):
    """The pieces of a grid that a rank needs, counted from the grid's first file and byte: alike in all layers."""

    files: Ints
    begins: Ints
    num_bytes: Ints
    to: Ints | None
    """The byte of the rank's memory where a piece is read into; None where they are copied"""
    tail: tuple[int, ...]
    """What a copied piece is made of: the sizes behind the dimension in which its rows follow each other"""
    copies: Ints
    """(n, 3, dims): where what is needed begins in what is read of a copied piece, and in the rank's; its sizes"""

    def place(self, row: int) -> _Place:
        """The shape of what is read of a copied piece, what of it is needed, and where that goes."""
        of_rows, of_local, sizes = self.copies[row].tolist()
        needed, to = (
            tuple(slice(at, at + size) for at, size in zip(begin, sizes, strict=True)) for begin in (of_rows, of_local)
        )
        return (*sizes[: len(sizes) - len(self.tail)], *self.tail), needed, to


class _Pieces(NamedTuple):
    """Pieces by files and places, one row each."""

    files: Ints
    begins: Ints
    num_bytes: Ints
    cut: Ints
    """Which of ``cuts`` it is of"""
    row: Ints
    """Which row of that"""
    cuts: list[tuple[_Target, _Cut]]


def _find(tensors: Mapping[str, Tensor], manifest: Manifest) -> Iterator[tuple[_Target, Grid, _Cut]]:
    known: dict[tuple[object, ...], _Cut | None] = {}
    rows_known = 0
    for name, tensor in tensors.items():
        stored = manifest.tensors[name]
        own = box_of(tensor)
        target = _Target(tensor, stored.dtype)
        for grid in stored.grids:
            key = (grid.offsets, grid.sizes, grid.axes, own, target.item, target.is_direct)
            if key not in known:
                if rows_known > MOST_PIECES:  # of tensors that are all cut in other ways
                    known = {}
                    rows_known = 0
                cut = known[key] = _cut(grid, own, target.item, target.is_direct)
                rows_known += len(cut.files) if cut else 1
            if cut := known[key]:
                yield target, grid, cut


def _cut(grid: Grid, own: Box, item: int, is_direct: bool) -> _Cut | None:
    overlaps = grid.overlaps(own)
    if overlaps is None:
        return None
    of_box = overlaps.shared_offsets - overlaps.offsets
    sizes = overlaps.shared_sizes
    of_local = overlaps.shared_offsets - np.array(own[0], np.int64)
    file = overlaps.files - grid.file
    dims = len(own[0])
    row_bytes = [item * math.prod(grid.sizes[dim + 1 :]) for dim in range(dims)]

    # Rows that follow each other are read as one, but not too many bytes; where a row is too large, those of a later
    # dimension. So what is needed of a box is cut into pieces of at most PIECE_BYTES, all boxes at once.
    along = next((dim for dim in range(dims) if row_bytes[dim] <= files.PIECE_BYTES), 0)
    for dim in range(min(along + 1, dims)):
        most = files.PIECE_BYTES // row_bytes[dim] if dim == along else 1
        number, which = ranges(np.zeros(len(sizes), np.int64), -(-sizes[:, dim] // most))
        file = file[which]
        of_box = of_box[which]
        of_local = of_local[which]
        sizes = sizes[which]
        of_box[:, dim] += number * most
        of_local[:, dim] += number * most
        sizes[:, dim] = np.minimum(sizes[:, dim] - number * most, most)

    # Where the pieces lie in their files. Whole rows go where they belong in this rank's memory as they are read; of
    # others more is read than is needed, and the needed part is copied.
    bytes_along = np.array(row_bytes[: along + 1], np.int64)
    begins = of_box[:, : along + 1] @ bytes_along
    num_bytes = sizes[:, along] * row_bytes[along] if dims else np.full(1, item)
    if is_direct and grid.sizes[1:] == own[1][1:] and (overlaps.shared_sizes[:, 1:] == own[1][1:]).all():
        return _Cut(file, begins, num_bytes, of_local[:, : along + 1] @ bytes_along, (), sizes[:0, None])
    of_box[:, : along + 1] = 0  # what lies before in a stored piece is not read
    return _Cut(file, begins, num_bytes, None, grid.sizes[along + 1 :], np.stack([of_box, of_local, sizes], 1))


def _next_pieces(found: Iterator[tuple[_Target, Grid, _Cut]]) -> _Pieces | None:
    """The next ``MOST_PIECES``, and those of the grid with the last of them."""
    cuts = []
    columns = []
    count = 0
    for target, grid, cut in found:
        cuts.append((target, cut))
        columns.append((cut.files + grid.file, cut.begins + grid.begin, cut.num_bytes, len(cut.files)))
        count += len(cut.files)
        if count >= MOST_PIECES:
            break
    if not cuts:
        return None
    # One row for each piece of any cut, sorted by files and places in them.
    in_files, begins, num_bytes, numbers = zip(*columns, strict=True)
    row, which = ranges(np.zeros(len(cuts), np.int64), np.array(numbers))
    file, begin, size = (np.concatenate(column) for column in (in_files, begins, num_bytes))
    order = np.lexsort((begin, file))
    return _Pieces(file[order], begin[order], size[order], which[order], row[order], cuts)


def _read_of_file(reader: files.StoredFileReader, pieces: _Pieces, own: slice, copied: _Copied) -> None:
    which = pieces.cut[own].tolist()
    rows = pieces.row[own].tolist()
    sizes = pieces.num_bytes[own].tolist()
    # Pieces that follow each other are one call of preadv, each into its own memory.
    for start, stop, position in _runs(pieces.begins[own], pieces.num_bytes[own]):
        views = []
        copies = []
        used = 0
        for number, row, num_bytes in zip(which[start:stop], rows[start:stop], sizes[start:stop], strict=True):
            target, cut = pieces.cuts[number]
            if cut.to is not None:
                to = int(cut.to[row])
                views.append(target.bytes[to : to + num_bytes])
            else:
                views.append(copied.view(used, num_bytes))
                copies.append((used, num_bytes, target, cut, row))
                used += -(-num_bytes // 8) * 8
        if reader.read_into_all(views, position) != sum(sizes[start:stop]):
            raise shorter()
        for copy in copies:
            copied.put(*copy)
        activity.tick()


def _runs(begins: Ints, num_bytes: Ints) -> Iterator[tuple[int, int, int]]:
    """First and last, and the place, of pieces that follow each other; not too many of them, nor too many bytes."""
    ends = begins + num_bytes
    firsts = np.concatenate([[0], 1 + np.flatnonzero(begins[1:] != ends[:-1]), [len(ends)]])
    positions = begins[firsts[:-1]]
    is_short = (ends[firsts[1:] - 1] - positions <= files.PIECE_BYTES) & (np.diff(firsts) <= files.MOST_VIEWS)
    edges = itertools.pairwise(firsts.tolist())
    for (at, end), position, is_one in zip(edges, positions.tolist(), is_short.tolist(), strict=True):
        if is_one:
            yield at, end, position
            continue
        while at < end:
            most = ends[at : min(end, at + files.MOST_VIEWS)]
            stop = at + max(1, int(np.searchsorted(most, begins[at] + files.PIECE_BYTES, "right")))
            yield at, stop, int(begins[at])
            at = stop
