"""Tensors to and from the files of a checkpoint: each rank writes its share, and reads what it holds.

A tensor is found by name and global shape, so a checkpoint loads onto any mesh: what a rank reads of a stored piece is
the overlap of two boxes.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain.checkpoint import files
from shardtrain.checkpoint.grids import Chunk
from shardtrain.checkpoint.holders import box_of, tables_of_ranks
from shardtrain.checkpoint.manifest import ITEM_BYTES, Manifest, StoredFile
from shardtrain.checkpoint.resharding import Box
from shardtrain.checkpoint.save_plan import Plan
from shardtrain.checkpoint.storage import Place
from shardtrain.ops.dtensor import local_tensor
from shardtrain.resilience import progress
from shardtrain.utils import garbage_collection
from shardtrain.utils.errors import CheckpointError

MOST_PIECES = 2**15
"""Of which ``read`` knows the places at a time, in some 15 MiB."""


def write(tensors: Mapping[str, Tensor], shares: Plan, folder: Place) -> StoredFile | None:
    """Write this rank's file into an existing folder; None where it has nothing to write. Raises OSError."""
    rank = dist.get_rank()
    names = shares.names_of(rank)
    if not names:
        return None
    return write_blocks((bytes_of(tensors[name]) for name in names), rank, dist.get_world_size(), folder)


def write_blocks(blocks: Iterable[memoryview], rank: int, world_size: int, folder: Place) -> StoredFile:
    """Write a rank's file; needs no process group. Raises OSError."""
    wait = files.SEEN_SECONDS if world_size > 1 else 0.0
    return files.write_hashed(folder / f"rank-{rank:05d}.bin", blocks, wait)


def find_damaged_file(manifest: Manifest, folder: Place) -> str:
    """What is wrong with this rank's share of the files, read whole; empty when nothing is.

    Rank r takes every n-th file from the r-th: on the mesh that wrote them its own, which it reads next.
    """
    share = manifest.files[dist.get_rank() :: dist.get_world_size()]
    return next((damage for file in share if (damage := files.find_damage(folder, file))), "")


def check_names(tensors: Mapping[str, Tensor], manifest: Manifest, folder: Place) -> None:
    """Refuse a checkpoint that has not what this run has (a collective).

    Raises:
        CheckpointError: for a missing name, another shape, a type that would lose what numbers mean, or a name that the
            checkpoint has and the run has not, where the run has others of the same section ("model", "optimizer").
    """
    asked = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
    everyone: dict[str, list[Any]] = {}
    for said in tables_of_ranks(asked)[0]:  # a pipeline stage holds some of the names only
        everyone.update(said)
    for name, (dtype, shape) in sorted(everyone.items()):
        stored = manifest.tensors.get(name)
        if stored is None:
            raise CheckpointError(f"checkpoint {folder} has no {name}; use the model that it was saved from")
        if list(stored.shape) != shape:
            raise CheckpointError(
                f"checkpoint {folder} holds {name} of shape {list(stored.shape)}, and this run has {shape}; use the "
                "model that it was saved from"
            )
        if stored.dtype != dtype and not (_is_float(stored.dtype) and _is_float(dtype)):
            raise CheckpointError(f"checkpoint {folder} holds {name} as {stored.dtype}, and this run has {dtype}")
    sections = {name.partition(".")[0] for name in everyone}
    surplus = [name for name in manifest.tensors if name not in everyone and name.partition(".")[0] in sections]
    if surplus:
        raise CheckpointError(
            f"checkpoint {folder} holds {len(surplus)} tensors that this run has not, such as {min(surplus)}; use the "
            "model that it was saved from"
        )


def read(tensors: Mapping[str, Tensor], manifest: Manifest, folder: Place) -> None:
    """Fill this rank's part of the tensors in place, converting floating-point types. Raises OSError.

    On another mesh a rank may need small pieces of many tensors from thousands of files. So they are read file by file,
    those that follow each other at once, and ``MOST_PIECES`` of all are known at a time.
    """
    pieces = _pieces(tensors, manifest)
    while runs := _some_runs(pieces):
        for number, in_file in itertools.groupby(runs, lambda run: run[0].file):
            with contextlib.closing(files.open_stored(folder / manifest.files[number].name)) as reader:
                for run in in_file:
                    _read_run(reader, run)
                    progress.tick()


class _Part:
    """What this rank holds of a tensor, and how bytes of a file get there."""

    def __init__(self, tensor: Tensor, box: Box, dtype: str) -> None:
        self.dtype, self.offsets = getattr(torch, dtype), box[0]
        self.local = local_tensor(tensor).detach()
        self.row_shape = tuple(self.local.shape[1:])
        self.row_bytes = self.local[:1].numel() * ITEM_BYTES[dtype] if self.local.ndim else ITEM_BYTES[dtype]
        self._bytes = None
        if self.local.device.type == "cpu" and self.local.dtype == self.dtype and self.local.is_contiguous():
            self._bytes = memoryview(self.local.reshape(-1).view(torch.uint8).numpy().data)

    def rows(self, box: Box) -> memoryview | None:
        """The memory of a box, where it is whole rows that can be read into it as they are stored."""
        if self._bytes is None or box[1][1:] != self.row_shape:
            return None
        begin = (box[0][0] - self.offsets[0]) * self.row_bytes if box[0] else 0
        return self._bytes[begin : begin + (box[1][0] if box[0] else 1) * self.row_bytes]


class _Copy(NamedTuple):
    """Rows of a stored piece of which a part is copied into a tensor, or all are converted."""

    chunk: Chunk
    shared: Box
    into: _Part


class _Piece(NamedTuple):
    """Rows of a stored piece that a rank needs, and where they go."""

    file: int
    position: int
    num_bytes: int
    to: memoryview | _Copy


def _pieces(tensors: Mapping[str, Tensor], manifest: Manifest) -> Iterator[_Piece]:
    for name, tensor in tensors.items():
        stored, own = manifest.tensors[name], box_of(tensor)
        into, item = _Part(tensor, own, stored.dtype), ITEM_BYTES[stored.dtype]
        for chunk, shared in stored.overlapping(own):
            first, rows = (shared[0][0] - chunk.offsets[0], shared[1][0]) if shared[0] else (0, 1)
            row_bytes = item * math.prod(chunk.sizes[1:])
            place = into.rows(shared) if chunk.sizes[1:] == shared[1][1:] else None
            to = _Copy(chunk, shared, into) if place is None else place
            yield _Piece(chunk.file, chunk.begin + first * row_bytes, rows * row_bytes, to)


@garbage_collection.paused()
def _some_runs(pieces: Iterator[_Piece]) -> list[list[_Piece]]:
    """The next ``MOST_PIECES``, by files and places; those that follow each other in a file are one run.

    No run has too many of them, nor too many bytes.
    """
    runs: list[list[_Piece]] = []
    file = end = size = 0
    for piece in sorted(itertools.islice(pieces, MOST_PIECES), key=operator.itemgetter(0, 1)):
        size += piece.num_bytes
        follows = runs and piece.position == end and piece.file == file
        if follows and size <= files.PIECE_BYTES and len(runs[-1]) < files.MOST_VIEWS:
            runs[-1].append(piece)
        else:
            runs.append([piece])
            size = piece.num_bytes
        file, end = piece.file, piece.position + piece.num_bytes
    return runs


def _read_run(reader: files.Reader, run: Sequence[_Piece]) -> None:
    views, copies = [], []
    for piece in run:
        if isinstance(piece.to, _Copy):
            data = torch.empty(piece.num_bytes, dtype=torch.uint8)  # filled at once, and not with zeros before
            views.append(memoryview(data.numpy().data))
            copies.append((data, piece.to))
        else:
            views.append(piece.to)
    if reader.read_into_all(views, run[0].position) != sum(map(len, views)):
        raise _shorter()
    for data, (chunk, shared, into) in copies:
        part(into.local, shared, into.offsets).copy_(_box_of_rows(data, chunk, into.dtype, shared))


def read_whole(manifest: Manifest, folder: Place, name: str) -> Tensor:
    """One tensor, whole, on the CPU; needs no process group. Hashes are not checked here."""
    stored = manifest.tensors[name]
    tensor = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    read({name: tensor}, manifest, folder)
    return tensor


def read_part(manifest: Manifest, folder: Place, name: str, wanted: Sequence[slice]) -> Tensor:
    """A box of one tensor, one slice per dimension, on the CPU; needs no process group. Hashes are not checked here."""
    stored, offsets = manifest.tensors[name], tuple(one.start for one in wanted)
    box = offsets, tuple(one.stop - one.start for one in wanted)
    tensor = torch.empty(box[1], dtype=getattr(torch, stored.dtype))
    for chunk, shared in stored.overlapping(box):
        with contextlib.closing(files.open_stored(folder / manifest.files[chunk.file].name)) as reader:
            if shared == box and chunk.sizes[1:] == box[1][1:]:  # whole rows of one piece: nothing to put together
                return read_box(reader, chunk, stored.dtype, shared)
            part(tensor, shared, offsets).copy_(read_box(reader, chunk, stored.dtype, shared))
    return tensor


def cast(tensors: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Copies of floating-point tensors in another type, for weights-only saves."""
    return {name: tensor.detach().to(getattr(torch, dtype)) for name, tensor in tensors.items()}


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of this rank's part, row after row."""
    local = local_tensor(tensor).detach().cpu().contiguous()
    return memoryview(local.reshape(-1).view(torch.uint8).numpy().data)


def read_box(reader: files.Reader, chunk: Chunk, dtype: str, wanted: Box) -> Tensor:
    """The wanted box of a stored piece: only the rows that it touches are read."""
    rows, first, shape = 1, 0, chunk.sizes
    if shape:
        first, rows = wanted[0][0] - chunk.offsets[0], wanted[1][0]
    row_bytes = ITEM_BYTES[dtype] * math.prod(shape[1:])
    data = torch.empty(rows * row_bytes, dtype=torch.uint8)  # filled at once, and not with zeros before
    if reader.read_into(memoryview(data.numpy().data), chunk.begin + first * row_bytes) != len(data):
        raise _shorter()
    return _box_of_rows(data, chunk, getattr(torch, dtype), wanted)


def _box_of_rows(data: Tensor, chunk: Chunk, dtype: torch.dtype, wanted: Box) -> Tensor:
    """The wanted box of the bytes of the rows of a stored piece that it touches."""
    shape = (wanted[1][0], *chunk.sizes[1:]) if chunk.sizes else ()
    return part(data.view(dtype).reshape(shape), wanted, (*wanted[0][:1], *chunk.offsets[1:]))


def _shorter() -> CheckpointError:
    return CheckpointError("a file of the checkpoint became shorter while it was read; start again")


def part(tensor: Tensor, box: Box, origin: tuple[int, ...]) -> Tensor:
    """A view of a box of a tensor whose first element lies at ``origin`` of the whole."""
    shape = tensor.shape
    for dim, (offset, size, start) in enumerate(zip(box[0], box[1], origin, strict=True)):
        if size != shape[dim]:
            tensor = tensor.narrow(dim, offset - start, size)
    return tensor


def _is_float(dtype: str) -> bool:
    return "float" in dtype
