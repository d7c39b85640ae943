"""Write and read the tensors of a checkpoint.

Each rank writes its share. A load finds tensors by name, and checks dtypes and unsharded shapes, so a checkpoint
loads on any mesh. A rank reads the overlap of its box with each stored box (``tensor_reader.py``).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain.checkpoint import files, tensor_reader
from shardtrain.checkpoint.collectives import rank_and_size
from shardtrain.checkpoint.grids import Chunk
from shardtrain.checkpoint.holders import tables_of_ranks
from shardtrain.checkpoint.manifest import Manifest, TensorFile
from shardtrain.checkpoint.resharding import Box
from shardtrain.checkpoint.save_plan import SavePlan
from shardtrain.checkpoint.storage import Place
from shardtrain.facts.dtypes import ITEM_BYTES
from shardtrain.ops.dtensor import local_tensor
from shardtrain.utils.errors import CheckpointError


def write(tensors: Mapping[str, Tensor], shares: SavePlan, folder: Place) -> TensorFile | None:
    """Write this rank's file into an existing folder. None if this rank has no data. Raises OSError."""
    rank = dist.get_rank()
    names = shares.names_of(rank)
    if not names:
        return None
    # A generator, so only one tensor at a time is copied to the host.
    blocks = (bytes_of(tensors[name]) for name in names)
    return write_blocks(blocks, rank, dist.get_world_size(), folder)


def write_blocks(
    blocks: Iterable[memoryview], rank: int, world_size: int, folder: Place
) -> TensorFile:
    """Write a rank's file. Requires no process group. Raises OSError."""
    # Another node may have created the folder, which becomes visible here after a while.
    wait_seconds = 0.0
    if world_size > 1:
        wait_seconds = files.SEEN_SECONDS
    return files.write_hashed(folder / f"rank-{rank:05d}.bin", blocks, wait_seconds)


def find_damaged_file(manifest: Manifest, folder: Place, reader: int | None = None) -> str:
    """Read this rank's share of the files in full. Return a description of the first damage, or "".

    Rank r of n reads every nth file, starting with file r. On the mesh that wrote the checkpoint, this is the
    file that the rank loads next. With ``reader``, only that rank reads, and it reads all files.
    """
    rank, size = rank_and_size()
    if reader is None:
        share = manifest.files[rank::size]
    elif reader == rank:
        share = manifest.files
    else:
        share = ()
    for file in share:
        damage = files.find_damage(folder, file)
        if damage:
            return damage
    return ""


def check_names(tensors: Mapping[str, Tensor], manifest: Manifest, folder: Place) -> None:
    """Reject a checkpoint whose tensors do not fit this run (a collective).

    Raises:
        CheckpointError: a name is missing, a shape differs, a dtype conversion would lose information, or the
            checkpoint has additional names in a section that the run uses ("model", "optimizer").
    """
    # Combine the tensors of all ranks, because a pipeline stage only has some of the names.
    expected_here = {}
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        expected_here[name] = [dtype, list(tensor.shape)]
    tables, _ = tables_of_ranks(expected_here)
    expected: dict[str, list[Any]] = {}
    for table in tables:
        expected.update(table)
    # Sorted, so all ranks report the same tensor.
    for name, (dtype, shape) in sorted(expected.items()):
        stored = manifest.tensors.get(name)
        if stored is None:
            raise CheckpointError(
                f"checkpoint {folder} has no {name}; use the model that it was saved from"
            )
        if list(stored.shape) != shape:
            raise CheckpointError(
                f"checkpoint {folder} holds {name} of shape {list(stored.shape)}, "
                f"and this run has {shape}; use the model that it was saved from"
            )
        # A conversion between float dtypes only rounds. Integers, such as counters, must stay exact.
        can_convert = _is_float(stored.dtype) and _is_float(dtype)
        if stored.dtype != dtype and not can_convert:
            raise CheckpointError(
                f"checkpoint {folder} holds {name} as {stored.dtype}, and this run has {dtype}",
            )
    # A run without an optimizer may load only the model, so compare only the sections that the run uses.
    sections = {_section(name) for name in expected}
    surplus = []
    for name in manifest.tensors:
        if name not in expected and _section(name) in sections:
            surplus.append(name)
    if surplus:
        raise CheckpointError(
            f"checkpoint {folder} contains {len(surplus)} tensors that this run does not have, "
            f"such as {min(surplus)}; use the model that it was saved from"
        )


def read_whole(manifest: Manifest, folder: Place, name: str) -> Tensor:
    """Return one full tensor on the CPU. Requires no process group. Does not verify hashes."""
    stored = manifest.tensors[name]
    tensor = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    tensor_reader.read({name: tensor}, manifest, folder)
    return tensor


def read_part(manifest: Manifest, folder: Place, name: str, wanted: Sequence[slice]) -> Tensor:
    """Return a box of one tensor on the CPU. Requires no process group. Does not verify hashes.

    ``wanted`` has one slice per dimension.
    """
    stored = manifest.tensors[name]
    offsets = tuple(extent.start for extent in wanted)
    sizes = tuple(extent.stop - extent.start for extent in wanted)
    box = (offsets, sizes)
    tensor = torch.empty(sizes, dtype=getattr(torch, stored.dtype))
    for chunk, shared in stored.overlapping(box):
        path = folder / manifest.files[chunk.file].name
        with contextlib.closing(files.open_stored(path)) as reader:
            values = read_box(reader, chunk, stored.dtype, shared)
        # The box consists of complete rows of one stored piece, so no copy is needed.
        if shared == box and chunk.sizes[1:] == sizes[1:]:
            return values
        target = part(tensor, shared, offsets)
        target.copy_(values)
    return tensor


def cast(tensors: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Return the tensors for weights-only saves: floating-point tensors are converted to ``dtype``."""
    torch_dtype = getattr(torch, dtype)
    return {name: tensor.detach().to(torch_dtype) for name, tensor in tensors.items()}


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of this rank's part in row-major order."""
    local = local_tensor(tensor).detach().cpu().contiguous()
    return memoryview(local.reshape(-1).view(torch.uint8).numpy().data)


def read_box(reader: files.StoredFileReader, chunk: Chunk, dtype: str, wanted: Box) -> Tensor:
    """Return the wanted box of a stored piece. Reads only the rows that overlap it."""
    offsets, sizes = wanted
    # Read complete rows along the first dimension, and return a view of their wanted elements.
    rows = 1
    first_row = 0
    shape_of_rows = chunk.sizes
    if shape_of_rows:
        rows = sizes[0]
        first_row = offsets[0] - chunk.offsets[0]
        shape_of_rows = (rows, *chunk.sizes[1:])
    row_bytes = ITEM_BYTES[dtype] * math.prod(chunk.sizes[1:])
    data = torch.empty(rows * row_bytes, dtype=torch.uint8)
    begin = chunk.begin + first_row * row_bytes
    num_read = reader.read_into(memoryview(data.numpy().data), begin)
    if num_read != len(data):
        raise tensor_reader.shorter()
    values = data.view(getattr(torch, dtype)).reshape(shape_of_rows)
    # The rows that were read begin at the box along the first dimension, and at the piece along the others.
    origin = (*offsets[:1], *chunk.offsets[1:])
    return part(values, wanted, origin)


def part(tensor: Tensor, box: Box, origin: tuple[int, ...]) -> Tensor:
    """Return a view of a box of a tensor whose first element has the global index ``origin``."""
    offsets, sizes = box
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != tensor.size(dim):
            tensor = tensor.narrow(dim, offset - origin[dim], size)
    return tensor


def _section(name: str) -> str:
    return name.partition(".")[0]


def _is_float(dtype: str) -> bool:
    return "float" in dtype
