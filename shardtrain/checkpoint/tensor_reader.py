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
        changes = np.flatnonzero(pieces.files[1:] != pieces.files[:-1]) + 1
        edges = [0, *changes.tolist(), len(pieces.files)]
        for first, last in itertools.pairwise(edges):
            stored_file = manifest.files[pieces.files[first]]
            with contextlib.closing(files.open_stored(folder / stored_file.name)) as reader:
                _read_of_file(reader, pieces, slice(first, last), copied)


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
        shard for it.
        """
        of_rows, of_local, sizes = self.copies[row].tolist()
        needed = _slices(of_rows, sizes)
        target = _slices(of_local, sizes)
        leading_sizes = sizes[: len(sizes) - len(self.tail)]
        return (*leading_sizes, *self.tail), needed, target


def _slices(starts: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


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
    known: dict[tuple[object, ...], _Cut | None] = {}
    rows_known = 0
    for name, tensor in tensors.items():
        stored = manifest.tensors[name]
        own = box_of(tensor)
        target = _Target(tensor, stored.dtype)
        for grid in stored.grids:
            key = (grid.offsets, grid.sizes, grid.axes, own, target.item, target.is_direct)
            if key not in known:
                if rows_known > MOST_PIECES:  # many tensors with different sharding
                    known = {}
                    rows_known = 0
                known[key] = _cut(grid, own, target.item, target.is_direct)
                new_cut = known[key]
                rows_known += len(new_cut.files) if new_cut else 1
            cut = known[key]
            if cut:
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

    # Divide the needed part of all boxes into pieces of at most PIECE_BYTES. A piece consists of
    # consecutive rows along the first dimension whose rows are small enough.
    along = next((dim for dim in range(dims) if row_bytes[dim] <= files.PIECE_BYTES), 0)
    for dim in range(min(along + 1, dims)):
        most = files.PIECE_BYTES // row_bytes[dim] if dim == along else 1
        num_pieces = -(-sizes[:, dim] // most)
        number, which = ranges(np.zeros(len(sizes), np.int64), num_pieces)
        file = file[which]
        of_box = of_box[which]
        of_local = of_local[which]
        sizes = sizes[which]
        of_box[:, dim] += number * most
        of_local[:, dim] += number * most
        sizes[:, dim] = np.minimum(sizes[:, dim] - number * most, most)

    # Compute the locations of the pieces in their files. Complete rows are read directly into the
    # shard. For incomplete rows, the complete row is read, and the needed part is copied.
    bytes_along = np.array(row_bytes[: along + 1], np.int64)
    begins = of_box[:, : along + 1] @ bytes_along
    num_bytes = sizes[:, along] * row_bytes[along] if dims else np.full(1, item)
    of_rows = own[1][1:]
    has_complete_rows = grid.sizes[1:] == of_rows
    if is_direct and has_complete_rows and (overlaps.shared_sizes[:, 1:] == of_rows).all():
        begins_in_shard = of_local[:, : along + 1] @ bytes_along
        return _Cut(file, begins, num_bytes, begins_in_shard, (), sizes[:0, None])
    of_box[:, : along + 1] = 0  # the bytes before a piece are not read
    copies = np.stack([of_box, of_local, sizes], 1)
    return _Cut(file, begins, num_bytes, None, grid.sizes[along + 1 :], copies)


def _next_pieces(found: Iterator[tuple[_Target, Grid, _Cut]]) -> _Pieces | None:
    """Return the next ``MOST_PIECES`` pieces, or a few more to complete the last grid. None at the end."""
    cuts = []
    columns = []
    count = 0
    for target, grid, cut in found:
        num_pieces = len(cut.files)
        cuts.append((target, cut))
        columns.append((cut.files + grid.file, cut.begins + grid.begin, cut.num_bytes, num_pieces))
        count += num_pieces
        if count >= MOST_PIECES:
            break
    if not cuts:
        return None
    # Create one row per piece, ordered by file and offset.
    in_files, begins, num_bytes, numbers = zip(*columns, strict=True)
    row, which = ranges(np.zeros(len(cuts), np.int64), np.array(numbers))
    file = np.concatenate(in_files)
    begin = np.concatenate(begins)
    size = np.concatenate(num_bytes)
    order = np.lexsort((begin, file))
    return _Pieces(file[order], begin[order], size[order], which[order], row[order], cuts)


def _read_of_file(
    reader: files.StoredFileReader, pieces: _Pieces, own: slice, copied: _Copied
) -> None:
    which = pieces.cut[own].tolist()
    rows = pieces.row[own].tolist()
    sizes = pieces.num_bytes[own].tolist()
    # Read consecutive pieces with one call of preadv, each into its own memory.
    for start, stop, position in _runs(pieces.begins[own], pieces.num_bytes[own]):
        views = []
        copies = []
        used = 0
        for number, row, num_bytes in zip(
            which[start:stop],
            rows[start:stop],
            sizes[start:stop],
            strict=True,
        ):
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
    """Yield (start, stop, offset) of runs of consecutive pieces, with limited number and size."""
    ends = begins + num_bytes
    # A run ends where the next piece does not follow immediately.
    gaps = np.flatnonzero(begins[1:] != ends[:-1])
    # The first piece of each run. The last entry is the end of the last run.
    bounds = np.concatenate([[0], 1 + gaps, [len(ends)]])
    positions = begins[bounds[:-1]]
    run_bytes = ends[bounds[1:] - 1] - positions
    is_short = (run_bytes <= files.PIECE_BYTES) & (np.diff(bounds) <= files.MOST_VIEWS)
    runs = itertools.pairwise(bounds.tolist())
    for (start, end), position, fits_one_read in zip(
        runs,
        positions.tolist(),
        is_short.tolist(),
        strict=True,
    ):
        if fits_one_read:
            yield start, end, position
            continue
        # Cut a long run after the last piece that is within both limits.
        while start < end:
            candidates = ends[start : min(end, start + files.MOST_VIEWS)]
            limit = begins[start] + files.PIECE_BYTES
            count = int(np.searchsorted(candidates, limit, "right"))
            stop = start + max(1, count)
            yield start, stop, int(begins[start])
            start = stop
