"""Checkpoints in a folder that only rank 0's node can access. The process group transfers the bytes
in pieces.

No rank stores more than one piece of another rank's data. Rank 0 writes and reads everything, so
one disk and one network link limit the speed. A folder that all nodes can access has no such limit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain.checkpoint import files
from shardtrain.checkpoint import tensors as tensor_files
from shardtrain.checkpoint.collectives import (
    all_gather_json,
    broadcast_json,
    first_rank,
    gather_distinct_json,
)
from shardtrain.checkpoint.grids import Chunk
from shardtrain.checkpoint.holders import box_of
from shardtrain.checkpoint.manifest import Manifest, TensorFile
from shardtrain.checkpoint.node_disks import speaks_for_its_node
from shardtrain.checkpoint.resharding import Box, overlap
from shardtrain.checkpoint.save_plan import SavePlan
from shardtrain.checkpoint.storage import Place
from shardtrain.facts.dtypes import ITEM_BYTES
from shardtrain.utils.errors import CheckpointError, StorageError
from shardtrain.utils.log import logger


def check_seen_by_all(folder: Place, nonce: str) -> None:
    """Reject a folder that is not the same on all nodes (a collective).

    Rank 0 writes a file there. One rank of each node waits up to ``files.SEEN_SECONDS`` for it,
    because network filesystems may show it late.

    Raises:
        StorageError: on all ranks; names the hosts that do not see it.
    """
    if dist.get_world_size() == 1 or not isinstance(folder, Path):
        return  # an object store is the same for all nodes
    sign = folder / f"probe-{broadcast_json(nonce)}"
    first_rank(lambda: files.write_durable(sign, b""))
    # One rank of each node looks, because the other ranks would see the same.
    wrong: dict[str, int] = {}
    waited = 0.0
    if speaks_for_its_node():
        wrong, waited = files.wait_for_sizes(folder, {sign.name: 0})
    looked = all_gather_json([round(waited, 1), os.uname().nodename, bool(wrong)])
    if dist.get_rank() == 0:
        sign.unlink(missing_ok=True)
    blind = sorted({host for _, host, is_blind in looked if is_blind})
    if blind:
        named = ", ".join(blind[:5])
        if len(blind) > 5:
            named += f" and {len(blind) - 5} more"
        verb = "do" if len(blind) > 1 else "does"
        raise StorageError(
            f"checkpoint.folder: {named} {verb} not see a file that rank 0 wrote into "
            f"{folder} within {files.SEEN_SECONDS:g} s; "
            "set job.dump_folder to a folder that all nodes see, use an "
            'object store, or set checkpoint.storage = "first_node"'
        )
    slowest, host, _ = max(looked)
    if slowest > files.LATE_SECONDS:
        logger.warning(
            f"checkpoint.folder: {host} saw a file of rank 0 {slowest} s late; {files.REMOUNT}"
        )


def write(tensors: Mapping[str, Tensor], shares: SavePlan, draft: Place) -> list[TensorFile]:
    """Write the files of all ranks on rank 0 and return them there; other ranks return [] (a collective).

    Raises:
        OSError: on rank 0, after the other ranks have sent everything.
    """
    written: list[TensorFile] = []
    failures: list[OSError] = []
    # One rank after the other: rank 0 receives from one while the others wait for their turn.
    for rank in range(dist.get_world_size()):
        is_own = rank == dist.get_rank()
        names = shares.names_of(rank)
        if not names:
            continue
        if dist.get_rank() == 0:
            blocks = (
                (tensor_files.bytes_of(tensors[name]) for name in names)
                if is_own
                else _received(shares, rank)
            )
            written += _write(draft / f"rank-{rank:05d}.bin", blocks, failures)
        elif is_own:
            # Send the pieces that ``_received`` expects.
            for name in names:
                block = tensor_files.bytes_of(tensors[name])
                for start in range(0, len(block), files.PIECE_BYTES):
                    piece = block[start : start + files.PIECE_BYTES]
                    dist.send(torch.frombuffer(piece, dtype=torch.uint8), 0)
    if failures:
        raise failures[0]
    return written


def _write(path: Place, blocks: Iterator[memoryview], failures: list[OSError]) -> list[TensorFile]:
    """Write a file and return it. After a failure, drop the blocks: their sender waits until they
    are received.
    """
    written = []
    if not failures:
        try:
            written.append(files.write_hashed(path, blocks))
        except OSError as error:
            failures.append(error)
    for _ in blocks:
        pass
    return written


def _received(shares: SavePlan, rank: int) -> Iterator[memoryview]:
    """Yield the blocks that a rank sends, in order."""
    for _, size in shares.pieces_of(rank):
        for start in range(0, size, files.PIECE_BYTES):
            piece_bytes = min(files.PIECE_BYTES, size - start)
            piece = torch.empty(piece_bytes, dtype=torch.uint8)
            dist.recv(piece, rank)
            yield memoryview(piece.numpy().data)


def read(tensors: Mapping[str, Tensor], manifest: Manifest, folder: Place, holder: int) -> None:
    """Fill the shards of all ranks with data that rank ``holder`` reads and broadcasts (a collective).

    Raises:
        OSError: on ``holder``, after the last broadcast.
    """
    # Every rank expects all broadcasts. After an error the holder sends zeros, and raises the error
    # at the end.
    failure: Exception | None = None
    names_of_ranks, _ = gather_distinct_json(sorted(tensors))
    all_names: set[str] = set()
    for names in names_of_ranks:
        all_names.update(names)
    # All ranks must broadcast in the same order, so sort the names.
    for name in sorted(all_names):
        stored = manifest.tensors[name]
        for chunk in stored.chunks():
            reader = None
            for box in _rows(chunk, ITEM_BYTES[stored.dtype]):
                piece = torch.zeros(box[1], dtype=getattr(torch, stored.dtype))
                if dist.get_rank() == holder and failure is None:
                    try:
                        if reader is None:
                            name_of_file = manifest.files[chunk.file].name
                            reader = files.open_stored(folder / name_of_file)
                        piece = tensor_files.read_box(reader, chunk, stored.dtype, box).contiguous()
                    except (OSError, CheckpointError) as error:
                        failure = error
                dist.broadcast(piece.reshape(-1).view(torch.uint8), holder)
                _take(tensors.get(name), piece, box)
            if reader:
                reader.close()
    if failure:
        raise failure


def _rows(chunk: Chunk, item_bytes: int) -> Iterator[Box]:
    """Divide a chunk into boxes of complete rows, each of about PIECE_BYTES, or of one row if it is
    larger.
    """
    if not chunk.sizes:
        yield chunk.offsets, chunk.sizes
        return
    first_row, *other_offsets = chunk.offsets
    num_rows, *row_sizes = chunk.sizes
    row_bytes = max(1, chunk.numel // num_rows * item_bytes)
    rows_per_box = max(1, files.PIECE_BYTES // row_bytes)
    for start in range(0, num_rows, rows_per_box):
        count = min(rows_per_box, num_rows - start)
        yield (first_row + start, *other_offsets), (count, *row_sizes)


def _take(tensor: Tensor | None, piece: Tensor, box: Box) -> None:
    """Copy the overlap of a box with this rank's shard into the shard."""
    if tensor is None:
        return
    shard_box = box_of(tensor)
    shared = overlap(shard_box, box)
    if shared is None:
        return
    shard = tensor_files.local_tensor(tensor).detach()
    received = tensor_files.part(piece, shared, box[0])
    tensor_files.part(shard, shared, shard_box[0]).copy_(received)
