"""Read a rank's shards from a checkpoint that was saved on any mesh.

On another mesh a rank may need small pieces of many tensors from thousands of files. Their
locations are computed for all pieces of a grid together, and once for all tensors with equal
sharding. Pieces are read file by file, and consecutive ones with one request. At most about
``MOST_PIECES`` locations are in memory at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
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
"""Number of pieces whose locations are in memory at a time. Each takes about 100 bytes."""
_MOST_PLACES = 2**13
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by item size. They can copy values of any dtype, also of those that NumPy lacks."""

_Place = tuple[tuple[int, ...], tuple[slice, ...], tuple[slice, ...]]


@garbage_collection.paused()
def read(tensors: Mapping[str, Tensor], manifest: Manifest, folder: Place) -> None:
    """Fill this rank's shards of the tensors in place, and convert floating-point dtypes. Raises OSError."""
    cuts = _find(tensors, manifest)
    copied = _Copied()
    while pieces := _next_pieces(cuts):
        copied.forget()
        # Read file by file. Open each file once for all of its known pieces.
        is_next_file = pieces.files[1:] != pieces.files[:-1]
        changes = np.flatnonzero(is_next_file) + 1
        edges = [0, *changes.tolist(), len(pieces.files)]
        for first, last in itertools.pairwise(edges):
            number = pieces.files[first]
            path = folder / manifest.files[number].name
            with contextlib.closing(files.open_stored(path)) as reader:
                _read_of_file(reader, pieces, slice(first, last), copied)


def needed_ranges(
    tensors: Mapping[str, Tensor], manifest: Manifest
) -> Iterator[tuple[int, int, int]]:
    """Yield number, offset and number of bytes of the parts of files that ``read`` would read."""
    cuts = _find(tensors, manifest)
    while pieces := _next_pieces(cuts):
        is_next_file = pieces.files[1:] != pieces.files[:-1]
        changes = np.flatnonzero(is_next_file) + 1
        edges = [0, *changes.tolist(), len(pieces.files)]
        for first, last in itertools.pairwise(edges):
            of_file = slice(first, last)
            number = int(pieces.files[first])
            sizes = pieces.num_bytes[of_file]
            for start, stop, position in _runs(pieces.begins[of_file], sizes):
                num_bytes = int(sizes[start:stop].sum())
                yield number, position, num_bytes


def shorter() -> CheckpointError:
    """Return the error for a file that ends too early."""
    return CheckpointError("a file of the checkpoint became shorter while it was read; start again")


class _Target:
    """This rank's shard of a tensor, as the destination of stored bytes.

    Attributes:
        item: Bytes per element in the file.
        is_as_stored: The shard has the stored dtype and is in host memory, so bytes can be copied unchanged.
        is_direct: The shard is also contiguous, so bytes can be read directly into it.
    """

    def __init__(self, tensor: Tensor, dtype: str) -> None:
        self.local = local_tensor(tensor).detach()
        self.item = ITEM_BYTES[dtype]
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.is_as_stored = self.local.dtype == self.dtype and self.local.device.type == "cpu"
        self.is_direct = self.is_as_stored and self.local.is_contiguous()

    @cached_property
    def bytes(self) -> memoryview:
        """The memory of the shard, as bytes."""
        return memoryview(self.local.reshape(-1).view(torch.uint8).numpy().data)

    @cached_property
    def integers(self) -> np.ndarray:
        """The shard as integers of equal size."""
        array: np.ndarray = self.local.view(_INTEGERS[self.item]).numpy()
        return array


class _Copied:
    """Buffer for pieces that are read and then copied, of one run of consecutive pieces at a time."""

    def __init__(self) -> None:
        # Each piece begins at a multiple of 8. The system allocates memory only when it is written to.
        self._bytes = np.empty(files.PIECE_BYTES + 8 * files.MOST_VIEWS, np.uint8)
        self._view = memoryview(self._bytes.data)
        self._tensor = torch.from_numpy(self._bytes)
        self._places: dict[tuple[int, int], _Place] = {}  # layers with equal sharding share them

    def view(self, begin: int, num_bytes: int) -> memoryview:
        """Return the part of the buffer for a piece."""
        return self._view[begin : begin + num_bytes]

    def put(self, begin: int, num_bytes: int, target: _Target, cut: _Cut, row: int) -> None:
        """Copy the needed part of a piece into the shard, and convert the dtype if it differs."""
        key = (id(cut), row)
        place = self._places.get(key)
        if place is None:
            # Clearing the cache limits its memory. Layers that follow fill it again.
            if len(self._places) > _MOST_PLACES:
                self._places.clear()
            place = cut.place(row)
            self._places[key] = place
        shape, needed, destination = place
        end = begin + num_bytes
        # Equal dtypes are copied as integers, which NumPy has for each item size. Only PyTorch can convert
        # all dtypes.
        if target.is_as_stored:
            integers = self._bytes[begin:end].view(target.integers.dtype)
            piece = integers.reshape(shape)
            target.integers[destination] = piece[needed]
        else:
            rows = self._tensor[begin:end].view(target.dtype).reshape(shape)
            target.local[destination].copy_(rows[needed])

    def forget(self) -> None:
        """Drop the locations of cuts that may have been freed."""
        self._places.clear()


class _Cut(NamedTuple):
    """The pieces of a grid that a rank needs. It is equal for layers with equal sharding.

    Attributes:
        files, begins: File and offset of each piece, relative to the grid's first file and offset.
        num_bytes: Size of each piece.
        to: Byte offset in the rank's shard into which each piece is read directly. None if pieces are copied.
        tail: Sizes of the dimensions after the one along which a copied piece consists of rows.
        copies: (n, 3, dims), for copied pieces: offsets of the needed part in the piece, and in the
            shard, and its sizes.
    """

    files: Ints
    begins: Ints
    num_bytes: Ints
    to: Ints | None
    tail: tuple[int, ...]
    copies: Ints

    def place(self, row: int) -> _Place:
        """Return the shape of a copied piece, the slices of its needed part, and the slices of the
        shard to which that part is copied.
        """
        of_rows, of_local, sizes = self.copies[row].tolist()
        needed = _slices(of_rows, sizes)
        target = _slices(of_local, sizes)
        leading_sizes = sizes[: len(sizes) - len(self.tail)]
        return (*leading_sizes, *self.tail), needed, target


def _slices(starts: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    stops = [start + size for start, size in zip(starts, sizes, strict=True)]
    return tuple(map(slice, starts, stops))


class _Pieces(NamedTuple):
    """Pieces ordered by file and offset, one row each.

    Attributes:
        cut: Index in ``cuts`` of the tensor and the ``_Cut`` that the piece belongs to.
        row: Index of the piece in the arrays of that ``_Cut``.
    """

    files: Ints
    begins: Ints
    num_bytes: Ints
    cut: Ints
    row: Ints
    cuts: list[tuple[_Target, _Cut]]


def _find(
    tensors: Mapping[str, Tensor], manifest: Manifest
) -> Iterator[tuple[_Target, Grid, _Cut]]:
    """Yield each grid that this rank needs, with the pieces that it needs of it."""
    known: dict[tuple[object, ...], _Cut | None] = {}
    rows_known = 0
    for name, tensor in tensors.items():
        stored = manifest.tensors[name]
        shard = box_of(tensor)
        target = _Target(tensor, stored.dtype)
        for grid in stored.grids:
            # everything that the cut depends on: file and offset of the grid are added later
            key = (grid.offsets, grid.sizes, grid.axes, shard, target.item, target.is_direct)
            if key not in known:
                if rows_known > MOST_PIECES:  # many tensors with different sharding
                    known = {}
                    rows_known = 0
                new_cut = _cut(grid, shard, target.item, target.is_direct)
                known[key] = new_cut
                rows_known += 1
                if new_cut:
                    rows_known += len(new_cut.files) - 1
            cut = known[key]
            if cut:
                yield target, grid, cut


def _cut(grid: Grid, shard: Box, item: int, is_direct: bool) -> _Cut | None:
    """Divide the part of a grid that a shard needs into pieces. None if they do not overlap."""
    overlaps = grid.overlaps(shard)
    if overlaps is None:
        return None
    shard_offsets, shard_sizes = shard
    of_box = overlaps.shared_offsets - overlaps.offsets
    of_local = overlaps.shared_offsets - np.array(shard_offsets, np.int64)
    sizes = overlaps.shared_sizes
    file = overlaps.files - grid.file
    dims = len(shard_offsets)
    row_bytes = []
    for dim in range(dims):
        row_elements = math.prod(grid.sizes[dim + 1 :])
        row_bytes.append(item * row_elements)

    # A piece has at most PIECE_BYTES. It consists of consecutive rows along the first dimension whose
    # rows are small enough. Along the dimensions before, it has an extent of one.
    along = 0
    for dim in range(dims):
        if row_bytes[dim] <= files.PIECE_BYTES:
            along = dim
            break
    for dim in range(min(along + 1, dims)):
        most = 1
        if dim == along:
            most = files.PIECE_BYTES // row_bytes[dim]
        num_pieces = -(-sizes[:, dim] // most)
        number, which = ranges(np.zeros(len(sizes), np.int64), num_pieces)
        file = file[which]
        of_box = of_box[which]
        of_local = of_local[which]
        sizes = sizes[which]
        skipped = number * most
        of_box[:, dim] += skipped
        of_local[:, dim] += skipped
        sizes[:, dim] = np.minimum(sizes[:, dim] - skipped, most)

    # Compute the locations of the pieces in their files.
    bytes_along = np.array(row_bytes[: along + 1], np.int64)
    begins = of_box[:, : along + 1] @ bytes_along
    num_bytes = np.full(1, item)
    if dims:
        num_bytes = sizes[:, along] * row_bytes[along]

    # Complete rows are read directly into the shard. For incomplete rows, the complete row is read, and
    # the needed part is copied.
    row_sizes = shard_sizes[1:]
    shard_has_complete_rows = grid.sizes[1:] == row_sizes
    if is_direct and shard_has_complete_rows:
        needs_complete_rows = overlaps.shared_sizes[:, 1:] == row_sizes
        if needs_complete_rows.all():
            begins_in_shard = of_local[:, : along + 1] @ bytes_along
            no_copies = sizes[:0, None]
            return _Cut(file, begins, num_bytes, begins_in_shard, (), no_copies)
    of_box[:, : along + 1] = 0  # the bytes before a piece are not read
    copies = np.stack([of_box, of_local, sizes], 1)
    tail = grid.sizes[along + 1 :]
    return _Cut(file, begins, num_bytes, None, tail, copies)


def _next_pieces(needed: Iterator[tuple[_Target, Grid, _Cut]]) -> _Pieces | None:
    """Return the next ``MOST_PIECES`` pieces, or a few more to complete the last grid. None at the end."""
    cuts = []
    files_of_cuts = []
    begins_of_cuts = []
    sizes_of_cuts = []
    pieces_of_cuts = []
    count = 0
    for target, grid, cut in needed:
        cuts.append((target, cut))
        files_of_cuts.append(cut.files + grid.file)
        begins_of_cuts.append(cut.begins + grid.begin)
        sizes_of_cuts.append(cut.num_bytes)
        pieces_of_cuts.append(len(cut.files))
        count += len(cut.files)
        if count >= MOST_PIECES:
            break
    if not cuts:
        return None

    # Create one row per piece, ordered by file and offset.
    row, which = ranges(np.zeros(len(cuts), np.int64), np.array(pieces_of_cuts))
    file = np.concatenate(files_of_cuts)
    begin = np.concatenate(begins_of_cuts)
    size = np.concatenate(sizes_of_cuts)
    order = np.lexsort((begin, file))
    return _Pieces(
        files=file[order],
        begins=begin[order],
        num_bytes=size[order],
        cut=which[order],
        row=row[order],
        cuts=cuts,
    )


def _read_of_file(
    reader: files.StoredFileReader, pieces: _Pieces, of_file: slice, copied: _Copied
) -> None:
    """Read the pieces of one file. ``of_file`` selects them from the rows of ``pieces``."""
    cuts = pieces.cut[of_file].tolist()
    rows = pieces.row[of_file].tolist()
    sizes = pieces.num_bytes[of_file].tolist()
    # Read consecutive pieces with one call of preadv, each into its own memory.
    for start, stop, position in _runs(pieces.begins[of_file], pieces.num_bytes[of_file]):
        views = []
        copies = []
        used = 0
        for place in range(start, stop):
            row = rows[place]
            num_bytes = sizes[place]
            target, cut = pieces.cuts[cuts[place]]
            if cut.to is not None:
                to = int(cut.to[row])
                views.append(target.bytes[to : to + num_bytes])
                continue
            views.append(copied.view(used, num_bytes))
            copies.append((used, num_bytes, target, cut, row))
            # The next piece begins at a multiple of 8, so its bytes can be viewed as numbers of any dtype.
            used += -(-num_bytes // 8) * 8
        num_read = reader.read_into_all(views, position)
        if num_read != sum(sizes[start:stop]):
            raise shorter()
        for copy in copies:
            copied.put(*copy)
        activity.tick()


def _runs(begins: Ints, num_bytes: Ints) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, offset) of runs of consecutive pieces, with limited number and size."""
    ends = begins + num_bytes
    # A run ends where the next piece does not follow immediately.
    gaps = np.flatnonzero(begins[1:] != ends[:-1])
    # The first piece of each run. The last entry is the end of the last run.
    bounds = np.concatenate([[0], 1 + gaps, [len(ends)]])
    positions = begins[bounds[:-1]]
    last_pieces = bounds[1:] - 1
    run_bytes = ends[last_pieces] - positions
    run_pieces = np.diff(bounds)
    fits_one_read = (run_bytes <= files.PIECE_BYTES) & (run_pieces <= files.MOST_VIEWS)
    runs = zip(
        itertools.pairwise(bounds.tolist()),
        positions.tolist(),
        fits_one_read.tolist(),
        strict=True,
    )
    for (start, end), position, fits in runs:
        if fits:
            yield start, end, position
            continue
        # Cut a long run after the last piece that is within both limits.
        while start < end:
            most_end = min(end, start + files.MOST_VIEWS)
            candidates = ends[start:most_end]
            limit = begins[start] + files.PIECE_BYTES
            count = int(np.searchsorted(candidates, limit, "right"))
            stop = start + max(1, count)
            yield start, stop, int(begins[start])
            start = stop
