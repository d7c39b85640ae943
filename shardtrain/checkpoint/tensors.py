"""Tensors to and from the files of a checkpoint: each rank writes its share, and reads what it holds.

A tensor is found by name and global shape, so a checkpoint loads onto any mesh: what a rank reads of a stored piece is
the overlap of two boxes. A piece that several ranks hold is written once, by the one with the least to write.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain.checkpoint import files
from shardtrain.checkpoint.collectives import all_gather_json, any_rank, gather_distinct_json
from shardtrain.checkpoint.manifest import (
    ITEM_BYTES,
    MAX_BYTES,
    Chunk,
    Manifest,
    StoredFile,
    StoredTensor,
    least_bytes,
    too_large,
)
from shardtrain.checkpoint.resharding import Box, overlap
from shardtrain.checkpoint.storage import Place
from shardtrain.ops.dtensor import local_slices, local_tensor
from shardtrain.resilience import progress
from shardtrain.utils.errors import CheckpointError


@dataclass(frozen=True)
class Plan:
    """What goes where, equal on all ranks: the stored tensors, and the bytes that each rank writes."""

    tensors: Mapping[str, StoredTensor]
    bytes_of: list[int]
    own: Mapping[str, list[Any]] = field(default_factory=dict)
    """This rank's parts, from which it was made."""
    holders: Mapping[tuple[str, Box], list[int]] = field(default_factory=dict)
    """Which ranks hold which part."""

    def names_of(self, rank: int) -> list[str]:
        """Tensors of which a rank writes a piece, in the order of its file."""
        number = self.file_numbers[rank]
        begins = [(c.begin, name) for name, t in self.tensors.items() for c in t.chunks if c.file == number]
        return [name for _, name in sorted(begins)]

    @cached_property
    def file_numbers(self) -> list[int]:
        """Place of each rank's file in the manifest; -1 for a rank that has nothing to write."""
        ends = itertools.accumulate(size > 0 for size in self.bytes_of)
        return [end - 1 if size else -1 for end, size in zip(ends, self.bytes_of, strict=True)]


def plan(tensors: Mapping[str, Tensor], earlier: Plan | None = None) -> Plan:
    """Share out the writing of all ranks' tensors (a collective); as earlier, where no rank's tensors have changed."""
    own = {
        name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), *map(list, box_of(tensor))]
        for name, tensor in tensors.items()
    }
    if not any_rank(earlier is None or earlier.own != own):
        assert earlier is not None
        return earlier
    holders: dict[tuple[str, Box], list[int]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, said in enumerate(all_gather_json(own)):
        for name, (dtype, shape, offsets, sizes) in said.items():
            kind = (dtype, tuple(shape))
            if kinds.setdefault(name, kind) != kind or dtype not in ITEM_BYTES:
                raise CheckpointError(f"{name} cannot be saved: it is {kind} on rank {rank}, and {kinds[name]} before")
            if all(sizes):
                holders.setdefault((name, (tuple(offsets), tuple(sizes))), []).append(rank)
    load = [0] * dist.get_world_size()
    places: list[tuple[str, Box, int, int]] = []
    # what one rank alone holds is decided; then what several hold evens out the rest
    for (name, box), ranks in sorted(holders.items(), key=lambda item: (len(item[1]), item[0])):
        writer = min(ranks, key=lambda rank: (load[rank], rank))
        places.append((name, box, writer, load[writer]))
        load[writer] += torch.Size(box[1]).numel() * ITEM_BYTES[kinds[name][0]]
    numbers = Plan({}, load).file_numbers
    chunks: dict[str, list[Chunk]] = {name: [] for name in kinds}
    for name, (offsets, sizes), writer, begin in places:
        chunks[name].append(Chunk(offsets, sizes, numbers[writer], begin))
    stored = {name: StoredTensor(*kinds[name], tuple(chunks[name])) for name in sorted(kinds)}
    if (num_bytes := least_bytes(stored)) > MAX_BYTES:
        raise CheckpointError(too_large(num_bytes))
    return Plan(stored, load, own=own, holders=holders)


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
    for said in gather_distinct_json(asked):  # a pipeline stage holds some of the names only
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
    """Fill this rank's part of the tensors in place, converting floating-point types. Raises OSError."""
    readers: dict[int, files.Reader] = {}
    try:
        for name, tensor in tensors.items():
            stored, own = manifest.tensors[name], box_of(tensor)
            into = local_tensor(tensor).detach()
            for chunk in stored.chunks:
                shared = overlap((chunk.offsets, chunk.sizes), own)
                if shared is None:
                    continue
                if chunk.file not in readers:
                    readers[chunk.file] = files.open_stored(folder / manifest.files[chunk.file].name)
                found = read_box(readers[chunk.file], chunk, stored.dtype, shared)
                part(into, shared, own[0]).copy_(found)
                progress.tick()
    finally:
        for reader in readers.values():
            reader.close()


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
    for chunk in stored.chunks:
        shared = overlap((chunk.offsets, chunk.sizes), box)
        if shared is None:
            continue
        with contextlib.closing(files.open_stored(folder / manifest.files[chunk.file].name)) as reader:
            if shared == box and chunk.sizes[1:] == box[1][1:]:  # whole rows of one piece: nothing to put together
                return read_box(reader, chunk, stored.dtype, shared)
            part(tensor, shared, offsets).copy_(read_box(reader, chunk, stored.dtype, shared))
    return tensor


def cast(tensors: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Copies of floating-point tensors in another type, for weights-only saves."""
    return {name: tensor.detach().to(getattr(torch, dtype)) for name, tensor in tensors.items()}


def box_of(tensor: Tensor) -> Box:
    """Where this rank's part is in the whole tensor; sizes hold a 0 where it has none."""
    slices = local_slices(tensor)
    box = tuple(s.start for s in slices), tuple(s.stop - s.start for s in slices)
    own = tuple(local_tensor(tensor).shape)
    if own != box[1] and not (0 in own and 0 in box[1]):
        raise CheckpointError(f"a rank's part has shape {own} and should have {box[1]}: this sharding is not supported")
    return box


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of this rank's part, row after row."""
    local = local_tensor(tensor).detach().cpu().contiguous()
    return memoryview(local.reshape(-1).view(torch.uint8).numpy().data)


def read_box(reader: files.Reader, chunk: Chunk, dtype: str, wanted: Box) -> Tensor:
    """The wanted box of a stored piece: only the rows that it touches are read."""
    item = ITEM_BYTES[dtype]
    rows, first, shape = 1, 0, chunk.sizes
    if shape:
        first, rows = wanted[0][0] - chunk.offsets[0], wanted[1][0]
    row_bytes = item * torch.Size(shape[1:]).numel()
    data = torch.empty(rows * row_bytes, dtype=torch.uint8)  # filled at once, and not with zeros before
    if reader.read_into(memoryview(data.numpy().data), chunk.begin + first * row_bytes) != len(data):
        raise CheckpointError("a file of the checkpoint became shorter while it was read; start again")
    read_rows = data.view(getattr(torch, dtype)).reshape((rows, *shape[1:]) if shape else ())
    begin = (wanted[0][0], *chunk.offsets[1:]) if shape else ()
    return part(read_rows, wanted, begin)


def part(tensor: Tensor, box: Box, origin: tuple[int, ...]) -> Tensor:
    """A view of a box of a tensor whose first element lies at ``origin`` of the whole."""
    for dim, (offset, size, start) in enumerate(zip(box[0], box[1], origin, strict=True)):
        tensor = tensor.narrow(dim, offset - start, size)
    return tensor


def _is_float(dtype: str) -> bool:
    return "float" in dtype
